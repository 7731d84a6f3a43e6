"""`meshwright plan`: what it prints, writes and refuses."""

import json
import shlex
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.planner.report import read_plan
from meshwright.serving import EngineConfig

SMALL = ["plan", "llama-3.2-1b", "--on", "v5e:4x4", "--batch", "32", "--seq", "2048"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_plan_prints_the_ranked_meshes_and_what_to_type_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(SMALL)
    text = capsys.readouterr().out
    for part in (
        "llama-3.2-1b on v5e:4x4: 16 chips",
        "batch 32 × 2,048 tokens",
        "tokens/s",
        "refused",
        "meshwright prove llama-3.2-1b --on v5e:4x4 --mesh",
        "meshwright train llama-3.2-1b --mesh",
    ):
        assert part in text, part


@pytest.mark.parametrize("columns", ["80", "120"])
def test_every_line_fits_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    main([*SMALL, "--cost-per-hour", "1.2"])
    main([*SMALL, "--explain", "fsdp=4,tp=4"])
    main([*SMALL, "--refused"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)


def test_the_json_is_a_plan_that_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "--json", "--cost-per-hour", "1.2"])
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    plan = read_plan(file)
    assert (plan.config.model, plan.config.batch, plan.cost_per_hour) == ("llama-3.2-1b", 32, 1.2)
    assert plan.best.memory.fits
    assert plan.best.choice.devices == 16


def test_the_page_and_the_data_can_be_asked_for_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "--json", "--html", str(tmp_path / "plan.html")])
    out, err = capsys.readouterr()
    json.loads(out)
    assert "wrote" in err
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_explain_shows_one_mesh_and_as_data_only_that(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--explain", "fsdp=-1,tp=4"])
    text = capsys.readouterr().out
    for part in ("fsdp=4,tp=4 on v5e:4x4", "memory of a device", "transfers", "roofline"):
        assert part in text
    main([*SMALL, "--explain", "fsdp=-1,tp=4", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == "dp=1,fsdp=4,tp=4,sp=1"
    assert data["collectives"]


def test_explain_of_a_mesh_that_cannot_be_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--explain", "tp=16"])  # 8 key heads
    assert "refused: " in capsys.readouterr().out
    main([*SMALL, "--explain", "tp=16", "--json"])
    assert json.loads(capsys.readouterr().out)["why"]


def test_constraints_leave_only_meshes_like_them(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--mesh", "tp=2,sp=1", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["ranked"]
    for one in data["ranked"]:
        assert [one["choice"]["sizes"][axis] for axis in ("tp", "sp")] == [2, 1]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_remat_and_micro_batches_can_be_fixed(
    remat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "--compute.remat", remat, "--accumulation", "2", "--json"])
    choices = [one["choice"] for one in json.loads(capsys.readouterr().out)["ranked"]]
    assert {(one["remat"], one["accumulation"]) for one in choices} == {(remat, 2)}


def test_serving_is_planned_with_its_cache(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--serve", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["engine"]["page_size"] == EngineConfig().page_size
    assert any("cache" in kind.lower() for kind in data["ranked"][0]["memory"]["kinds"])
    main([*SMALL, "--serve"])
    assert "serving" in capsys.readouterr().out


def test_the_report_of_the_largest_model_on_thousands_of_chips_is_small(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = "plan llama-3.1-405b --on v5p:16x16x16 --batch 2048 --seq 8192 --html"
    main([*shlex.split(command), str(tmp_path / "p.html")])
    assert (tmp_path / "p.html").stat().st_size < 4e6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--on", "v5q:4x4"], ["no chip is called 'v5q'", "mw.Machine(mw.Chip(...)"]),
        (["--on", "nonsense"], ["'nonsense' is not known", "CHIP:SHAPE"]),
        (["--top", "0"], ["--top 0"]),
        (["--cost-per-hour", "-1"], ["cost_per_hour=-1.0 is not a price"]),
        (["--cost-per-hour", "nan"], ["is not a price"]),
        (["--mesh", "pt<=8"], ["'pt'", "did you mean 'tp'?"]),
        (["--mesh", "tp<8"], ["tp<8"]),
        (["--mesh", "1,-1,2"], ["3 sizes without a name"]),
        (["--rank-by", "latency"], ["rank_by='latency' is the time of a token of serving"]),
        (["--explain", "fsdp=5"], ["needs 5 devices, 16 are in 'v5e:4x4'"]),
        (["--explain", "pt=4"], ["'pt'"]),
        (["--explain", "fsdp=4,tp=4", "--mesh", "tp=2"], ["'fsdp=4,tp=4' was not looked at"]),
        (["--html", "/nowhere/p.html"], ["'/nowhere/p.html' cannot be written"]),
    ],
)
def test_mistakes_are_one_readable_message_and_status_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = dict(zip(SMALL[2::2], SMALL[3::2], strict=True))
    flags |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    given = [word for flag in flags.items() for word in flag]
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL[:2], *given])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "said",
    [
        ["--compute.remat", "full"],
        ["--accumulation", "2"],
        ["--optimizer.name", "lion"],
        ["--curve"],
    ],
)
def test_what_only_training_has_is_refused_for_serving(
    said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, "--serve", *said])
    assert stopped.value.code == 2
    assert "is of training, and serving is planned" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--batch 0 --seq 64", "--batch 8 --seq 64 --accumulation 0"])
def test_settings_are_checked_as_trains_are(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "tiny", "--on", "v5e:4x4", *flags.split()])
    assert "=0 must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        ("--context-parallel ring --mesh sp=4", "context_parallel", "ring"),
        ("--compute.sequence-parallel --mesh tp=4", "sequence_parallel", True),
        ("--compute.mlp-chunk 512", "mlp_chunk", 512),
    ],
)
def test_settings_of_train_are_kept(
    flags: str, setting: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, *flags.split(), "--json"])
    choices = [one["choice"] for one in json.loads(capsys.readouterr().out)["ranked"]]
    assert {one[setting] for one in choices} == {value}


def test_sizes_in_order_are_limits_too(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--mesh", "1,-1,2,1", "--json"])
    meshes = [one["mesh"] for one in json.loads(capsys.readouterr().out)["ranked"]]
    assert meshes == ["dp=1,fsdp=8,tp=2,sp=1"]


def test_an_unknown_model_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "lama-3.1-8b", *SMALL[2:]])
    message = capsys.readouterr().err
    assert "'lama-3.1-8b'" in message
    assert "llama-3.1-8b" in message.replace("'lama-3.1-8b'", "")


def test_a_model_that_fits_no_mesh_says_how_many_devices_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "llama-3.1-405b", "--on", "h100:8", "--batch", "8", "--seq", "4096"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "405b" in message
    assert "h100" in message


RUN = [*shlex.split("plan llama-3.2-1b --batch 32 --seq 2048 --tokens 10B --on")]


def test_machines_are_compared_in_the_terminal_and_as_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*RUN, "h100:8,v5e:2x4", "--curve"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for part in ("10.0B tokens", "cheapest first", "h100:8", "v5e:2x4", "scaling", "next"):
        assert part in text
    main([*RUN, "h100:8,v5e:2x4", "--json", "--curve"])
    data = json.loads(capsys.readouterr().out)
    first, second = data["machines"]
    assert first["cost"] < second["cost"]
    for one in data["machines"]:
        hours = 10e9 / one["tokens_per_second"] / one["goodput"] / 3600
        assert one["cost"] == pytest.approx(8 * hours * one["price"]["dollars"])
    assert [one["chips"] for one in data["curve"]][-1] == 32


def test_the_curve_of_a_machine_keeps_the_limits_and_the_imbalance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--rank-by", "fastest", "--mesh", "tp=4", "--curve", "--json"]
    main([*SMALL, *words])
    data = json.loads(capsys.readouterr().out)
    rates = {one["machine"]: one["tokens_per_second"] for one in data["curve"]}
    assert rates["v5e:4x4"] == data["ranked"][0]["tokens_per_second"]
    experts = "plan qwen3-30b-a3b --on h200:8 --batch 64 --seq 2048 --mesh ep=8 --imbalance 3"
    main([*shlex.split(experts), *words[:2], *words[4:]])
    data = json.loads(capsys.readouterr().out)
    assert data["curve"][0]["machine"] == "h200:8"
    assert data["curve"][0]["tokens_per_second"] == data["ranked"][0]["tokens_per_second"]


def test_the_tokens_of_a_run_add_time_and_cost_to_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([*SMALL, "--tokens", "1T", "--json", "--restart", "1h", "--failures", "0.01"])
    data = json.loads(capsys.readouterr().out)
    assert (data["tokens"], data["cost_per_hour"]) == (1e12, 1.2)
    assert data["long_run"]["restart"] == 3600
    run, rate = data["ranked"][0]["run"], data["ranked"][0]["tokens_per_second"]
    assert run["seconds"] == pytest.approx(1e12 / rate / run["goodput"])
    assert run["cost"] == pytest.approx(16 * run["seconds"] / 3600 * 1.2)
    main([*SMALL, "--tokens", "1T", "--top", "1"])
    assert "1.00T tokens: " in capsys.readouterr().out
    main([*SMALL, "--tokens", "1T", "--json", "--top", "2"])
    assert len(json.loads(capsys.readouterr().out)["ranked"]) == 2 < len(data["ranked"])


def test_a_batch_and_a_length_that_are_not_given_are_chosen_as_in_a_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "llama-3.2-1b", "--tokens", "10B", "--json", "--on"]
    main([*words, "v5e:4x4"])
    one = capsys.readouterr()
    main([*words, "v5e:4x4,h100:8"])
    several = capsys.readouterr()
    main([*words, "v5e:4x4,h100:8", "--top", "1"])
    assert (
        json.loads(capsys.readouterr().out)["machines"] == json.loads(several.out)["machines"][:1]
    )
    config = json.loads(one.out)["config"]
    assert config["seq"] == 8192
    law = "(by a scaling law: --batch auto)"
    assert f"--batch {config['batch']} {law} and --seq 8192" in one.err
    assert one.err == several.err


def test_meshes_by_time_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--rank-by", "fastest", "--json"])
    times = [
        (one["memory"]["tight"], one["step_seconds"])
        for one in json.loads(capsys.readouterr().out)["ranked"]
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ("--batch auto", 512),
        ("--batch=auto", 512),
        ("--batch-tokens 4M", 2048),
        ("--batch 24", 24),
        ("--batch 24 --compute.attention auto", 24),
    ],
)
def test_a_batch_as_people_give_it(
    words: str, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*shlex.split(f"plan llama-3.2-1b --on h100:8 --seq 2048 --json {words}")])
    assert json.loads(capsys.readouterr().out)["config"]["batch"] == batch


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--on h100,v5p", "give its tokens, as in --tokens 1T"),
        ("--on h100:8 --within 3d", "--within needs the tokens of the run"),
        ("--on h100 --tokens 1X", "--tokens: '1X' is not an amount"),
        ("--on h100 --tokens 1T --within 3", "--within: '3' is not a time"),
        (f"--on h100:8 --batch-tokens {'9' * 400}", "is not an amount"),
        ("--on h100 --tokens 1T --failures -1", "--failures: '-1' is not a number above 0"),
        ("--on h100,nope --tokens 1T", "machine 'nope' is not known"),
        ("--on h100:8 --tokens 1T --budget 10", "the cheapest takes"),
        ("--on h100:8 --tokens 1T --within 1h", "the shortest takes"),
        ("--on h100 --tokens 1T --serve", "--tokens is of training, and serving is planned"),
        ("--on h100:8 --batch 8 --seq 64 --serve --tokens=1T", "--tokens is of training"),
        ("--on h100:8 --batch 8 --seq 64 --serve --restart 1h", "--restart is of training"),
        (
            "--on h100:8 --serve --requests 2 --prompt 9 --output 9 --failures 1",
            "not go with --req",
        ),
        ("--on h100:8 --failures 0.01", "--failures needs the tokens of the run: --tokens 1T"),
        ("--on h100:8 --restart=1h", "--restart needs the tokens of the run: --tokens 1T"),
        ("--on h100:8 --checkpoint-write 1e9", "--checkpoint-write needs the tokens of the run"),
        ("--on h100:8 --explain tp=2 --curve", "--curve is of all meshes, and --explain tp=2 of"),
        ("--on h100:8 --explain tp=2 --refused", "--refused is of all meshes, and --explain tp=2"),
        ("--on h100:8 --explain tp=2 --top 3", "--top is of all meshes, and --explain tp=2 of one"),
        ("--on h100:8 --explain tp=2 --html p.html", "--html is of all meshes, and --explain"),
        (
            "--on h100:8 --batch 8 --seq 64 --serve --engine.max-adapter-rank 64",
            "max_adapter_rank=64 is of slots for adapters, and none are planned; give their number",
        ),
        ("--on h100 --tokens 1T --explain tp=2", "is of one machine with a size"),
        ("--on h100:8 --seq 128 --batch 8 --batch-tokens 4M", "give one of them"),
        ("--on h100 --tokens 1T --catalogue nope.toml", "'nope.toml' cannot be read"),
    ],
)
def test_mistakes_in_a_question_about_machines(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "llama-3.2-1b", *shlex.split(words)])
    assert said in capsys.readouterr().err


def test_machines_compared_are_written_as_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machines.html"
    words = ["--on", "h100:8,h200:8", "--batch", "64", "--seq", "128", "--tokens", "1B"]
    main(["plan", "tiny", *words, "--html", str(file)])
    assert capsys.readouterr().out == f"wrote {file}\n"
    text = file.read_text()
    assert "h100:8" in text
    assert "h200:8" in text


@pytest.mark.parametrize(
    "words",
    [
        "--mesh tp=2",
        "--mesh 'fsdp=*,tp>=2,tp<=4'",
        "--mesh 1,-1,4,1",
        "--failures 0.01 --restart 1.5h --checkpoint-write 12345678",
        "--failures 1e-5 --restart 0.001s --checkpoint-write 2G",
        "--compute.remat none --accumulation 1",
        "--mesh tp=4 --compute.no-sequence-parallel --context-parallel auto",
        "--tokens 1234567890",
        "--num-partitions 4",
    ],
)
def test_the_next_command_of_a_comparison_plans_the_same(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "llama-3.2-1b", "--batch", "32", "--seq", "512", *shlex.split(words)]
    asked += ["--on", "h100:8,h200:8"] + ([] if "--tokens" in words else ["--tokens", "1.5T"])
    main([*asked, "--json"])
    first = json.loads(capsys.readouterr().out)["machines"][0]
    main(asked)
    _, _, command = capsys.readouterr().out.partition("next\n")
    main([*shlex.split(command.replace("\\\n", ""))[1:], "--json"])
    out, err = capsys.readouterr()
    best = json.loads(out)["ranked"][0]
    assert not err  # nothing is left to be chosen
    for name in ("mesh", "step_seconds"):
        assert best[name] == first[name]
    for name in ("seconds", "cost"):
        assert best["run"][name] == pytest.approx(first[name], rel=1e-12)
    for name in ("remat", "accumulation"):
        assert best["choice"][name] == first[name]


def test_the_next_command_of_a_comparison_has_its_catalogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[chips.mine]\nlike = "h100"\n[prices]\nmine = 0.5\n')
    words = ["--on", "mine:8,h200:8", "--batch", "64", "--seq", "128", "--tokens", "1B"]
    main(["plan", "tiny", *words, "--catalogue", str(file)])
    _, _, command = capsys.readouterr().out.partition("next\n")
    program, *words = shlex.split(command.replace("\\\n", ""))
    assert program == "meshwright"
    main(words)
    assert "mine:8" in capsys.readouterr().out
