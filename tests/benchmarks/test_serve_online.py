"""The load test sees every token of every stream, and counts what is lost."""

import asyncio

from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import serving

from meshwright.serving.settings import LimitsConfig
from serve_online import Load, Result, arrivals, capacity, metric, table


def test_all_tokens_are_seen_and_lost_requests_counted() -> None:
    limits = LimitsConfig(requests=30)
    with serving(BigramEngine(delay=0.001), limits=limits, access_log=False) as server:
        load = Load(
            "127.0.0.1", server.port, vocab=256, prompt=10, new=8, sampling={"temperature": 1.0}
        )
        assert asyncio.run(capacity(load, 10, concurrency=5)) > 1
        before = metric(server.url, "meshwright_generated_tokens_total")
        results, seconds = asyncio.run(arrivals(load, 30, rate=300))
        assert all(result.is_whole and result.status == 200 for result in results)
        assert all(0 < len(result.times) <= result.tokens for result in results)
        seen = sum(result.tokens for result in results)
        assert seen == metric(server.url, "meshwright_generated_tokens_total") - before
        shown = table([*results, Result(429, (), 0.0, 8, False)], seconds, 300, {})
        assert shown[0].startswith("31 requests at 300.00/s, 1 lost;")
