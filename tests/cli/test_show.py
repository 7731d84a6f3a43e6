"""The command line: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main

MESH = ["show", "--mesh", "fsdp=4,tp=4", "--on", "v5e:4x4"]


def test_show_prints_the_mesh_the_arrays_and_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [*MESH, "--array", "64x32 a b -> a@fsdp b@tp", "--array", "64 a -> a@tp", "--model", "tiny"]
    )
    text = capsys.readouterr().out
    for part in (
        "mesh fsdp=4,tp=4 on v5e:4x4: 16 devices",
        "a 16:32",
        "x (4)",
        "layers/mlp/gate",
    ):
        assert part in text
    assert text.count(" shards of ") == 2


def test_show_says_how_far_the_hops_of_a_ring_go(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "--mesh", "1,1,4,128", "--on", "v4:8x8x8"])
    assert "\nsp: ring of 128, 56 of 128 hops take 2 links, 8 take 3\n" in capsys.readouterr().out
    main(["show", "--mesh", "1,1,4,128", "--on", "v4:8x8x8", "--json"])
    axes = {axis["name"]: axis for axis in json.loads(capsys.readouterr().out)["axes"]}
    assert axes["sp"]["hops_by_links"] == {"1": 64, "2": 56, "3": 8}
    assert "ring" not in axes["tp"]


def test_show_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*MESH, "--html", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "wrote" in capsys.readouterr().out


def test_show_prints_data(capsys: pytest.CaptureFixture[str]) -> None:
    main([*MESH, "--json", "--model", "tiny"])
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == "fsdp=4,tp=4"
    assert len(data["devices"]) == 16
    assert data["model"]["bytes_per_device"] > 0


@pytest.mark.parametrize("mesh", ["fsdp=16", "data=16", "data=4,model=4"])
def test_axes_that_a_mesh_does_not_name_have_size_1(
    mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["show", "--mesh", mesh, "--on", "v5e:4x4", "--json", "--model", "tiny"])
    assert json.loads(capsys.readouterr().out)["model"]["bytes_per_device"] > 0


def test_show_takes_rules_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text(".*norm => ... -> ...\n.* => x ... -> x@fsdp ...\n")
    main([*MESH, "--model", "tiny", "--rules", str(rules)])
    assert "vocab" not in capsys.readouterr().out
    rules.write_text(
        "vocab->tp; embed->fsdp; mlp->tp; heads->tp; kv_heads->tp; head_dim->none; norm->none; "
        "layers->none"
    )
    main([*MESH, "--model", "tiny", "--rules", str(rules)])
    assert "vocab@tp" in capsys.readouterr().out


def test_machines_lists_the_catalogue_and_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    main(["machines"])
    assert "459 TFLOP/s" in capsys.readouterr().out
    main(["machines", "v5p"])
    assert "docs.cloud.google.com/tpu/docs/v5p" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out.startswith("meshwright 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "--mesh", "fsdp=3,tp=4", "--on", "v5e:4x4"], ["needs 12 devices, 16 are in 'v5e:4x4'", "would fit"]),
        (["show", "--mesh", "fsdp=3"], ["needs 3 devices", "--on v5e:4x4"]),
        ([*MESH, "--array", "a b -> a b"], ["'4096x1024 embed mlp"]),
        ([*MESH, "--array", "64x32 a b -> a@fsdp b@pt"], ["'pt'", "did you mean 'tp'?"]),
        ([*MESH, "--model", "lama"], ["'lama' is not a preset"]),
        ([*MESH, "--rules", "x"], ["--rules needs --model"]),
        ([*MESH, "--model", "tiny", "--rules", "nowhere.txt"], ["'nowhere.txt' cannot be read"]),
        ([*MESH, "--html", "/nowhere/page.html"], ["'/nowhere/page.html' cannot be written"]),
        (["show", "--mesh", "rows=16", "--on", "v5e:4x4", "--model", "tiny"], ["'rows' has no role"]),
        (["machines", "v5"], ["'v5' is not known"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_readable_message_and_status_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for word in words:
        assert word in message


def test_an_unknown_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*MESH, "--aray", "x"])
    assert stopped.value.code == 2
    assert "--array" in capsys.readouterr().err


def test_data_and_page_can_be_asked_for_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*MESH, "--json", "--html", str(tmp_path / "page.html")])
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert "wrote" in printed.err


def test_axes_can_have_names_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "--mesh", "4,4", "--axes", "rows,dp", "--on", "v5e:4x4"])
    assert "rows" in capsys.readouterr().out
