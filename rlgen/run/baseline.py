"""What the ladder measured before: when a number changes, was it the upgrade?"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgen.files import read_json, write_json
from rlgen.sentinel.verdict import Rung

NOTABLE = 3.0  # a value this many times the earlier one is a change
NOISE = 0.1  # of the bound; below it, values change with nothing


@dataclass(frozen=True, slots=True)
class Baselines:
    """Stored measurements of one model and dtype, one entry for each engine version, torch and device.

    Args:
        folder: where baselines lie.
        model: what is compared over time, such as {"path": "tiny:qwen3", "dtype": "float32", "engine": "colocated"}.
    """

    folder: Path
    model: Mapping[str, str | None]

    @property
    def path(self) -> Path:
        return self.folder / f"{hashlib.sha256(json.dumps(dict(self.model), sort_keys=True).encode()).hexdigest()[:16]}.json"

    def entries(self) -> list[dict[str, Any]]:
        """Oldest first."""
        entries: list[dict[str, Any]] = read_json(self.path)["entries"] if self.path.exists() else []
        return entries

    def store(self, versions: Mapping[str, str], rungs: Sequence[Rung]) -> None:
        """Takes the place of an entry of the same versions."""
        entry = {
            "versions": dict(versions),
            "time": time.strftime("%Y-%m-%d"),
            "measured": {rung.name: dict(rung.measured) for rung in rungs if rung.measured},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        others = [other for other in self.entries() if other["versions"] != entry["versions"]]
        write_json(self.path, {"model": dict(self.model), "entries": [*others, entry]})

    def compare(self, versions: Mapping[str, str], rungs: Sequence[Rung]) -> str | None:
        """One sentence: is anything worse than it was, and did a version change in between? None without a baseline."""
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
    """What is measured as notably larger than before."""
    return [
        f"{rung.name}, {name}: {before[name]:.2g} -> {value:.2g}"
        for name, value in rung.measured.items()
        if name in before and value > NOTABLE * before[name] and value > NOISE * (rung.bound or 0.0)
    ]
