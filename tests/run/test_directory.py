"""The directory of a run: nobody else's, closed to strangers, and no half file on a full disk."""

import errno
import fcntl
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Proof, read_jsonl
from helpers.before import before
from helpers.disk import fill, mounted
from helpers.waiting import HANGS

from rlgen.errors import CheckpointError, UsageError
from rlgen.files import appears, private_files, read_json, write_json, write_text
from rlgen.metrics import Metric
from rlgen.run import directory as module
from rlgen.run.directory import RunDirectory, read_records


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    opened = RunDirectory.create(tmp_path / "run", "recipe", "resolved")
    yield opened
    opened.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, "256k") as place:
        yield place


# --- a full disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(70)
def test_a_full_disk_leaves_no_half_record(small_disk: Path, proof: Proof) -> None:
    run = RunDirectory.create(small_disk / "run", "recipe", "resolved")
    run.write_metrics({"step": 1})
    run.write_status("running", 1, 9)
    write_json(run.provenance, [{"rlgen": "0"}])
    taken = fill(small_disk)
    content = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    long = {"text": "x" * 9000}
    for write in (
        lambda: run.write_metrics({"step": 2, **long}),
        lambda: run.write_nonfinite(2, long),
        lambda: run.write_status("running", 2, 9, message="x" * 9000),
        lambda: write_json(run.provenance, [long]),
    ):
        with pytest.raises(CheckpointError, match=r"No space left on device; free space or change run\.dir") as caught:
            write()
        assert caught.value.exit_code == 8
    assert content == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}, "as it was, nothing half there"
    # the last words are written all the same
    run.write_status("failed", 1, 9, 8, "the disk is full")
    assert read_json(run.status_file)["exit_code"] == 8
    run.close()
    (small_disk / "ballast").unlink()
    again = RunDirectory.reopen(run.path)
    again.write_metrics({"step": 2})
    assert [record["step"] for record in read_jsonl(run.metrics)] == [1, 2]
    again.close()
    proof(f"{taken} bytes of ballast, 0 free: four writes failed, no byte changed")


@pytest.mark.fault(70)
def test_a_full_disk_at_the_start_does_not_block_the_next(small_disk: Path, proof: Proof) -> None:
    fill(small_disk, left=8192)
    with pytest.raises(CheckpointError, match="free space"):
        RunDirectory.create(small_disk / "run", "recipe\n" * 9000, "resolved")
    (small_disk / "ballast").unlink()
    RunDirectory.create(small_disk / "run", "recipe", "resolved").close()
    proof("8 KiB free: the recipe did not fit; the same start succeeds afterwards")


# --- shared storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault(70)
def test_one_of_many_that_start_at_once_gets_it(tmp_path: Path, proof: Proof) -> None:
    outcomes: list[object] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        try:
            outcomes.append(RunDirectory.create(tmp_path / "a" / "run", "recipe", "resolved"))
        except UsageError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened = [one for one in outcomes if isinstance(one, RunDirectory)]
    refused = [one for one in outcomes if isinstance(one, str) and ("in use" in one or "already holds" in one)]
    assert (len(opened), len(refused)) == (1, 7)
    opened[0].close()
    proof("8 starts at once: 1 opened it, 7 refused with exit 2")


@pytest.mark.fault(70)
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EIO, errno.EWOULDBLOCK, errno.EACCES])
def test_a_lock_that_cannot_be_had_is_not_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, proof: Proof
) -> None:
    asked: list[int] = []

    def flock(file: int, how: int) -> None:
        asked.append(file)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    # By a clock that goes on with each look at it: there is time for a second try, and no more.
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr(module, "PATIENCE", 0.15)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    held = code in (errno.EWOULDBLOCK, errno.EACCES)
    with pytest.raises((UsageError, CheckpointError), match="in use" if held else r"\.lock cannot be written") as caught:
        RunDirectory.create(tmp_path / "run", "recipe", "resolved")
    assert caught.value.exit_code == (2 if held else 8)
    assert len(asked) == (2 if held else 1), "only who holds a lock is waited for"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(asked[0])
    proof(f"flock: {os.strerror(code)}; asked {len(asked)} times, exit {caught.value.exit_code}")


def test_a_lock_that_was_removed_with_its_folder_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before(fcntl, "flock", lambda *_: shutil.rmtree(tmp_path / "run"), monkeypatch.setattr)  # by a start that failed
    with pytest.raises(UsageError, match="was removed just now, by another start that failed; start again"):
        RunDirectory.create(tmp_path / "run", "recipe", "resolved")


@pytest.mark.fault(70)
def test_what_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    (tmp_path / "run").mkdir()
    looked: list[Path] = []

    def looks(path: Path) -> None:
        looked.append(path)
        if len(looked) == 3:
            write_text(tmp_path / "run" / "resolved.yaml", "x")

    before(os, "scandir", looks, monkeypatch.setattr)
    monkeypatch.setattr(module, "appears", lambda path: appears(path, HANGS))
    RunDirectory.join(tmp_path / "run")
    assert looked == [tmp_path / "run"] * 3
    monkeypatch.setattr(module, "appears", lambda path: appears(path, 0.2))
    with pytest.raises(UsageError, match="is not visible to every process"):
        RunDirectory.join(tmp_path / "nowhere")
    proof("resolved.yaml came when the folder had been looked at three times, and was waited for")


def test_a_line_that_was_cut_within_a_character_is_no_step(run: RunDirectory) -> None:
    run.write_metrics({"step": 1, "reward/größe/mean": 0.5})
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole + whole[: whole.index("ö".encode()) + 1])
    assert read_records(run.metrics)[-1] == {"step": 1, "reward/größe/mean": 0.5}
    run.cut(1)
    assert run.metrics.read_bytes() == whole and len(run.read_metrics()) == 1


def test_metrics_of_earlier_versions_have_their_names_of_today(run: RunDirectory) -> None:
    run.write_metrics({"step": 1, "is/raw_mean": 1.0, "groups/replaced": 2})
    assert read_records(run.metrics) == [{"step": 1, Metric.IS_RATIO_MEAN: 1.0, Metric.GROUPS_RESAMPLED: 2}]


@pytest.mark.parametrize("damaged", ["", '{"step": 1, "st', "[]", "null", "\udce4"])
def test_a_damaged_status_is_said_and_written_again(run: RunDirectory, damaged: str) -> None:
    run.status_file.write_text(damaged, errors="surrogateescape")
    assert run.status()["state"] == "unknown"
    assert (
        run.status()["message"] == f"{run.status_file} is damaged; --resume goes on from the last checkpoint, and writes it again"
    )
    run.write_status("running", 1, 9)
    assert run.status()["state"] == "running"


@pytest.mark.parametrize("damaged", ["", '[{"rlgen": ', "{}"])
def test_a_damaged_provenance_is_no_missing_one(run: RunDirectory, damaged: str) -> None:
    run.provenance.write_text(damaged)
    with pytest.raises(
        CheckpointError, match=r"provenance\.json is damaged; bring it back, or delete it: --resume then cannot check data"
    ):
        run.attempts(run.path)


def test_a_line_without_a_step_is_left_out(run: RunDirectory) -> None:
    run.metrics.write_text('{"a": 1}\n{"step": null}\n{"step": 2}\n[1]\n')
    assert run.read_metrics() == [{"step": 2}]


# --- --clean -----------------------------------------------------------------------------------------------------------------


@pytest.mark.fault(17)
def test_clean_deletes_a_run_and_nothing_else(run: RunDirectory, tmp_path: Path, proof: Proof) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (run.path / "link").symlink_to(outside)
    (run.checkpoints / "link").symlink_to(outside)
    (run.checkpoints / "step_000001").mkdir()
    run.write_status("running", 1, 2)
    with pytest.raises(UsageError, match="in use by a running rlgen"):
        RunDirectory.clean(run.path)
    assert (run.checkpoints / "step_000001").exists()
    run.close()
    RunDirectory.clean(run.path)
    assert [path.name for path in run.path.iterdir()] == [".lock"] and (outside / "kept").exists()
    RunDirectory.create(run.path, "recipe", "resolved").close()
    RunDirectory.clean(tmp_path / "not there")
    proof("refused while locked, then emptied; the folder behind two links kept its file")


def test_while_one_start_cleans_another_does_not_begin(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status("done", 1, 2, 0)
    run.close()
    locked = (run.path / ".lock").stat().st_ino
    seen: list[bool] = []
    look = lambda folder: seen.append((run.path / ".lock").stat().st_ino == locked)  # noqa: E731
    before(shutil, "rmtree", look, monkeypatch.setattr)
    RunDirectory.clean(run.path)
    assert seen == [True] * 3 and (run.path / ".lock").stat().st_ino == locked


@pytest.mark.fault(17)
def test_what_clean_refuses(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    run.write_status("done", 2, 2, 0)
    run.close()
    link = tmp_path / "link"
    link.symlink_to(run.path)
    home = tmp_path / "home" / "me"
    (home / "runs").mkdir(parents=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "status.json").write_text('{"state": "fine"}')
    (tmp_path / "linked_status").mkdir()
    (tmp_path / "linked_status" / "status.json").symlink_to(run.status_file)
    (tmp_path / "file").touch()
    for folder in (home, home.parent):  # a status of ours would not help
        (folder / "status.json").write_text(run.status_file.read_text())
    monkeypatch.setenv("HOME", str(home))
    count = sum(1 for _ in tmp_path.rglob("*"))
    refused = []
    for place, words in [
        (Path("/"), "home directory, the working directory, or holds one"),
        (home, "home directory"),
        (home.parent, "home directory"),
        (Path.cwd(), "working directory"),
        (link, "is a link"),
        (other, "holds no status.json of a run of rlgen; if it may go, remove it yourself; nothing was deleted"),
        (home / "runs", "holds no status.json"),
        (tmp_path / "linked_status", "holds no status.json"),
        (tmp_path / "file", "is not a folder"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            RunDirectory.clean(place)
        assert caught.value.exit_code == 2 and "nothing was deleted" in str(caught.value)
        refused.append(words)
    assert count == sum(1 for _ in tmp_path.rglob("*"))
    proof(f"{len(refused)} places refused, {count} entries before and after")


# --- permissions -------------------------------------------------------------------------------------------------------------


def test_the_owner_reads_what_is_written_under_any_umask(tmp_path: Path) -> None:
    umask = os.umask(0o777)
    try:
        with private_files():
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "file").touch()
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("folder", "folder/file")]
    assert modes == [0o700, 0o600], "no more than the umask leaves to others"


@pytest.mark.fault(91)
def test_control_files_are_not_opened_through_links(run: RunDirectory, tmp_path: Path, proof: Proof) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run.metrics.symlink_to(victim)
    run.status_file.symlink_to(victim)
    run.save_now.symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is a link, and rlgen follows no links"):
        run.write_metrics({"step": 1})
    with pytest.raises(CheckpointError, match=r"status\.json is a link"):
        run.status()
    run.write_status("running", 1, 2)  # takes the link's place
    assert not run.status_file.is_symlink() and run.status()["step"] == 1
    assert run.asked_to_save() and not run.asked_to_save() and not run.save_now.is_symlink()
    run.close()
    (run.path / ".lock").unlink()
    (run.path / ".lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"\.lock is a link"):
        RunDirectory.reopen(run.path)
    assert victim.read_text() == "precious"
    proof("links in place of metrics, status, save_now, lock: refused or replaced, the file behind them untouched")


LEFT = ["provenance.json", "metrics.jsonl", "journal/step_000001.bin", "rollouts/step_000001.parquet", "notes.txt"]
LEFT += ["checkpoints/step_000001/manifest.json", "checkpoints/set_aside/step_000001/manifest.json"]


@pytest.mark.fault(17)
def test_a_start_that_failed_gives_its_place_up_unless_it_left_something(run: RunDirectory, proof: Proof) -> None:
    run.write_status("failed", 0, 9, 4, "no such column")
    (run.logs / "rlgen.log").write_text("why")
    with pytest.raises(UsageError, match="in use by a running rlgen"):
        RunDirectory.create(run.path, "corrected", "resolved anew")
    run.close()
    for name in LEFT:
        left = run.path / name
        folders = [folder for folder in left.parents if not folder.exists()]
        left.parent.mkdir(parents=True, exist_ok=True)
        left.touch()
        with pytest.raises(UsageError, match=r"already holds a run; go on with --resume, .* or delete .* --clean"):
            RunDirectory.create(run.path, "corrected", "resolved anew")
        left.unlink()
        for folder in folders:
            folder.rmdir()
    again = RunDirectory.create(run.path, "corrected", "resolved anew")
    assert (run.path / "recipe.yaml").read_text() == "corrected" and run.resolved.read_text() == "resolved anew"
    assert [path.name for path in run.logs.iterdir()] == ["attempt_1"]
    assert (run.logs / "attempt_1" / "rlgen.log").read_text() == "why"
    again.write_status("failed", 1, 9, 6)
    again.close()
    status = run.status_file.read_text()
    for text in (status, '{"step": 0}', "{", "[]"):  # it has trained a step; no status of ours
        run.status_file.write_text(text)
        with pytest.raises(UsageError, match="already holds a run"):
            RunDirectory.create(run.path, "corrected", "resolved")
    proof(f"failed with exit 4 and logs: taken over; with one of {len(LEFT)} things more: exit 2")
