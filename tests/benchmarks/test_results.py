"""What RESULTS.md says of where numbers come from."""

from results import origins

JAX = "jax 0.10.2, libtpu 0.0.42.1"


def entry(**changes: str) -> dict[str, str]:
    return {"compiler": JAX, "machine": "x86_64", "date": "2026-11-15"} | changes


def test_programs_are_grouped_by_compiler_and_machine_with_their_dates() -> None:
    entries = [entry(), entry(date="2026-11-17"), entry(machine="aarch64")]
    assert origins(entries) == (
        f"{JAX}, on aarch64, 2026-11-15 (1 program); {JAX}, on x86_64, 2026-11-15 to 2026-11-17 (2 programs)"
    )


def test_what_was_not_recorded_is_said() -> None:
    assert origins([{"compiler": JAX, "date": "2026-11-15"}]) == (
        f"{JAX}, machine not recorded, 2026-11-15 (1 program)"
    )
    assert (
        origins([{}])
        == "compiler not recorded, machine not recorded, date not recorded (1 program)"
    )
