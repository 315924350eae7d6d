"""Stores the measurements of the sentinel, and compares new ones with them, to tell whether an upgrade changed a number."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgen.files import read_json, write_json
from rlgen.sentinel.verdict import Rung

NOTABLE = 3.0  # a value is worse if it is more than this many times the earlier one
NOISE = 0.1  # share of the bound; below it, values vary without any cause


@dataclass(frozen=True, slots=True)
class Baselines:
    """Stored measurements of a model, one entry for each combination of engine version, torch version and device.

    `model` is what is compared over time, such as {"path": "tiny:qwen3", "dtype": "float32", "engine": "colocated"}.
    """

    folder: Path
    model: Mapping[str, str | None]

    @property
    def path(self) -> Path:
        return self.folder / f"{hashlib.sha256(json.dumps(dict(self.model), sort_keys=True).encode()).hexdigest()[:16]}.json"

    def entries(self) -> list[dict[str, Any]]:
        return read_json(self.path)["entries"] if self.path.exists() else []

    def store(self, versions: Mapping[str, str], rungs: Sequence[Rung]) -> None:
        """Stores the measurements of `rungs` for these versions, and replaces an earlier entry of the same versions."""
        entry = {
            "versions": dict(versions),
            "time": time.strftime("%Y-%m-%d"),
            "measured": {rung.name: dict(rung.measured) for rung in rungs if rung.measured},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        others = [other for other in self.entries() if other["versions"] != entry["versions"]]
        write_json(self.path, {"model": dict(self.model), "entries": [*others, entry]})

    def compare(self, versions: Mapping[str, str], rungs: Sequence[Rung]) -> str | None:
        """Returns as a sentence whether anything is worse than in the baseline, and which versions changed since.

        Returns None without a baseline. The baseline is the newest entry of the same versions, or else the newest one.
        """
        entries = self.entries()
        if not entries:
            return None
        same = [entry for entry in entries if entry["versions"] == dict(versions)]
        earlier = (same or entries)[-1]
        was = earlier["versions"]
        updated = [f"{name} {was.get(name)} -> {now}" for name, now in versions.items() if was.get(name) != now]
        since = f"the baseline of {earlier['time']}"
        worse = [change for rung in rungs for change in risen(rung, earlier["measured"].get(rung.name, {}))]
        if not worse:
            return f"no worse than {since}" + (f", with {', '.join(updated)}" if updated else "")
        reason = f"it came with {', '.join(updated)}" if updated else "versions and device are the same: not an upgrade"
        return f"worse than {since}: {'; '.join(worse)}; {reason}"


def risen(rung: Rung, before: Mapping[str, float]) -> list[str]:
    """Returns the values of `rung` that are notably larger than before, in words: above `NOTABLE` times, and above the noise."""
    return [
        f"{rung.name}, {name}: {before[name]:.2g} -> {value:.2g}"
        for name, value in rung.measured.items()
        if name in before and value > NOTABLE * before[name] and value > NOISE * (rung.bound or 0.0)
    ]
