"""lm-eval's tasks, on the engine: `meshwright eval RUN --tasks arc_easy,hellaswag`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data import added_tokens
from meshwright.errors import MeshwrightError, did_you_mean, not_installed
from meshwright.models import encodes_prompts
from meshwright.serving import Completion, LanguageModel, Request, Sampling, answer_stops

_TOGETHER = 512  # requests, from one line of progress to the next
_MAX_NEW = 256  # tokens, of tasks that name no limit


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Which tasks of lm-eval, and how they are asked; see its own docs."""

    names: tuple[str, ...]
    include_path: Path | None = None
    """A folder of YAML files that describe more tasks."""
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False

    def manager(self) -> Any:
        """lm-eval's list of tasks, with all of these; or an error."""
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as reason:
            raise MeshwrightError(
                f"--tasks are those of lm-eval, which cannot be imported ({reason}): "
                f"{not_installed('eval')}"
            ) from None
        if self.include_path is not None and not self.include_path.is_dir():
            raise MeshwrightError(f"--include-path {self.include_path} is no folder")
        found = TaskManager(include_path=None if not self.include_path else str(self.include_path))
        for name in self.names:
            if not found.match_tasks([name]):
                hint = did_you_mean(name, found.all_tasks)
                if "did you mean" not in hint:
                    hint = "; `lm-eval ls tasks` lists them, --include-path adds a folder of more"
                raise MeshwrightError(f"lm-eval has no task {name!r}{hint}")
        return found


@dataclasses.dataclass(frozen=True)
class TaskResults:
    results: Mapping[str, Any]  # lm-eval's own

    def data(self) -> dict[str, Any]:
        return {"tasks": self.results["results"]}

    def table(self) -> str:
        """lm-eval's table of metrics, in Markdown."""
        from lm_eval.utils import make_table

        groups = [make_table(self.results, "groups")] if self.results.get("groups") else []
        return "\n".join([make_table(self.results), *groups]).strip()


def run_tasks(model: LanguageModel, tasks: Tasks, manager: Any = None) -> TaskResults:
    """What lm-eval measures of a model; `manager` is that of the tasks, if it was made before."""
    if encodes_prompts(model.source.config):
        raise MeshwrightError(
            f"{model.source.name} has an encoder, and lm-eval's tasks score the tokens of prompts; "
            "give a decoder"
        )
    manager = tasks.manager() if manager is None else manager
    if tasks.apply_chat_template:
        model.check_chat()
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(
            _lm(model), tasks=list(tasks.names), num_fewshot=tasks.num_fewshot, limit=tasks.limit,
            apply_chat_template=tasks.apply_chat_template, task_manager=manager, log_samples=False,
        )  # fmt: skip
    except (OSError, ValueError, KeyError) as reason:
        lines = str(reason).strip().splitlines() or [type(reason).__name__]
        raise MeshwrightError(
            f"lm-eval could not run {', '.join(tasks.names)}: {lines[0]}"
        ) from reason
    return TaskResults(found)


def _lm(model: LanguageModel) -> Any:
    """The model as lm-eval takes one."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm

    source, engine = model.source, model.engine
    before, _ = added_tokens(source.tokenizer)

    def run(requests: Sequence[Request]) -> Iterable[Completion]:
        with tqdm(total=len(requests), desc="requests", disable=not requests) as progress:
            for first in range(0, len(requests), _TOGETHER):
                some = requests[first : first + _TOGETHER]
                yield from engine.generate(some)
                progress.update(len(some))

    class EngineLM(TemplateLM):  # type: ignore[misc]
        tokenizer_name = source.tokenizer.identity
        templated = False  # the chat template has written the special tokens

        @property
        def eot_token_id(self) -> int:
            return source.tokenizer.end_of_document

        @property
        def prefix_token_id(self) -> int:
            return before[-1] if before and source.special_tokens else self.eot_token_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            special = add_special_tokens
            if special is None:
                special = source.special_tokens and not self.templated
            return [int(token) for token in source.tokenizer.encode_batch([string], special)[0]]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return self._scores(pairs)

        def _scores(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[float, bool]]:
            """Log-probability of continuations, and whether each is the greedy one."""
            prompts = [tuple([*start, *rest][-engine.max_length :]) for start, rest in pairs]
            asked = [Request(one, Sampling(0), 0, prompt_logprobs=0) for one in prompts]
            found = []
            for (_, rest), done in zip(pairs, run(asked), strict=True):
                # a first token has nothing before it that it could be scored by
                scored = [one for one in done.prompt_logprobs[-len(rest) :] if one is not None]
                greedy = all(one.rank == 0 for one in scored)
                found.append((sum(one.logprob for one in scored), greedy))
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows: list[list[Any]] = []
            for request in requests:
                tokens = self.tok_encode(request.args[0], add_special_tokens=False)
                rolled = get_rolling_token_windows(
                    tokens, self.prefix_token_id, engine.max_length - 1, 1
                )
                windows.append([make_disjoint_window(pair) for pair in rolled])
            scores = iter(self._scores([pair for one in windows for pair in one]))
            return [sum(next(scores)[0] for _ in one) for one in windows]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = []
            for context, settings in (request.args for request in requests):
                most = int(settings.get("max_gen_toks") or _MAX_NEW)
                most = min(most, engine.max_length - 1)
                tokens = self.tok_encode(context)[-(engine.max_length - most) :]
                stop = settings.get("until") or ()
                stops = (stop,) if isinstance(stop, str) else tuple(stop)
                request = Request(tuple(tokens), _sampling(settings), most, stops)
                if self.templated:
                    end_tokens, ends = answer_stops(model.template, source.tokenizer)
                    request = dataclasses.replace(
                        request, stop=(*stops, *ends), stop_tokens=end_tokens
                    )
                asked.append(request)
            return [done.text for done in run(asked)]

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            self.templated = True
            continued = not add_generation_prompt
            return model.template.render(
                chat_history, generation_prompt=add_generation_prompt, continue_final=continued
            )

    return EngineLM()


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """That of a task: greedy, unless it says do_sample, or a temperature."""
    temperature = float(settings.get("temperature") or 0.0)
    if settings.get("do_sample") and "temperature" not in settings:
        temperature = 1.0
    if settings.get("do_sample") is False:
        temperature = 0.0
    chosen = {name: settings[name] for name in ("top_k", "top_p", "min_p") if name in settings}
    return Sampling(temperature, **chosen)
