"""Multi-process runs: join, compare settings, watchdog, signals; simulated CPU devices."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.launch.agreement import (
        TIMEOUT_S,
        Agreement,
        Fact,
        StoreAgreement,
        compare_processes,
    )
    from meshwright.launch.cache import cache_folder, keep_compiled_programs
    from meshwright.launch.comparison import (
        by_content,
        convert_paths,
        flat_settings,
        software_facts,
        weights_sample,
    )
    from meshwright.launch.coordinator import CoordinatorLostError, Store, coordinator_store
    from meshwright.launch.cpu import (
        check_simulated,
        make_room_for_cpu_collectives,
        quick_compile_options,
        simulate_devices,
    )
    from meshwright.launch.failure import EXIT_CODE, AgreedError, end_process, ends_together
    from meshwright.launch.gpu import take_most_gpu_memory
    from meshwright.launch.link import Follower, Leader, open_link
    from meshwright.launch.processes import Joined, join
    from meshwright.launch.signals import Stop, agree, stop_on_signals
    from meshwright.launch.watchdog import HANG_TIMEOUT_S, Watchdog, pause_timeout_s

__all__ = [
    "EXIT_CODE", "HANG_TIMEOUT_S", "TIMEOUT_S", "AgreedError", "Agreement", "CoordinatorLostError",
    "Fact", "Follower", "Joined", "Leader", "Stop", "Store", "StoreAgreement", "Watchdog", "agree",
    "by_content", "cache_folder", "check_simulated", "compare_processes", "convert_paths",
    "coordinator_store", "end_process", "ends_together", "flat_settings", "join",
    "keep_compiled_programs", "make_room_for_cpu_collectives", "open_link", "pause_timeout_s",
    "quick_compile_options", "simulate_devices", "software_facts", "stop_on_signals",
    "take_most_gpu_memory", "weights_sample",
]  # fmt: skip

import_when_used(__name__)
