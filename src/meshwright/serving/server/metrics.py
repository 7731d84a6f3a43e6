"""Metrics for Prometheus: latencies that the server measures, and the engine's own counters."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from meshwright.serving.request import EngineStats

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RATE_SECONDS = 1.0  # shorter than this between two reads, tokens/s would be noise


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.responses = Counter(
            "meshwright_http_responses", "HTTP responses; 499: the client closed the connection.",
            ("route", "status"), registry=self._registry,
        )  # fmt: skip
        self.first_token = self._seconds("time_to_first_token", "From request to first token.")
        self.between_tokens = self._seconds("inter_token_latency", "Between two tokens.", _FAST)
        self.duration = self._seconds("request_duration", "From request to last token.")

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = _SLOW) -> Histogram:
        return Histogram(
            f"meshwright_{name}_seconds", text, buckets=buckets, registry=self._registry
        )

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Reads the engine's stats when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats
        self._last = (time.monotonic(), 0)
        self._rate = 0.0

    def describe(self) -> list[Metric]:
        return []  # registering asks nothing of the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:  # there is no engine yet
            return
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, text, value in (
            ("requests_running", "Sequences in the batch.", stats.running),
            ("requests_waiting", "Sequences in the queue.", stats.waiting),
            ("cache_usage_ratio", "Share of KV cache pages that requests hold.", usage),
            ("cache_pages", "Pages of the KV cache.", stats.pages_total),
            ("generated_tokens_per_second", "Since the last read.", self._tokens_per_second(stats)),
        ):
            yield GaugeMetricFamily(f"meshwright_{name}", text, value=value)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("cached_prompt_tokens", "Those found in the cache.", stats.cached_prompt_tokens),
            ("generated_tokens", "Generated tokens.", stats.generated_tokens),
            ("preemptions", "Sequences that gave up their pages.", stats.preemptions),
            ("engine_steps", "Steps of the engine.", stats.steps),
            ("compilations_after_ready", "Should be 0.", stats.compilations_after_ready),
        ):
            yield CounterMetricFamily(f"meshwright_{name}", text, value=value)
        finished = CounterMetricFamily(
            "meshwright_requests_finished", "Sequences by finish reason.", labels=("reason",)
        )
        for reason, number in stats.finished.items():
            finished.add_metric((reason,), number)
        yield finished

    def _tokens_per_second(self, stats: EngineStats) -> float:
        now, (before, tokens) = time.monotonic(), self._last
        if now - before >= _RATE_SECONDS:
            self._rate = (stats.generated_tokens - tokens) / (now - before)
            self._last = (now, stats.generated_tokens)
        return self._rate
