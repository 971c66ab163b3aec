"""Everything that is known of one program when it is diagnosed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubench import findings
from gpubench.metrics import Metric
from gpubench.trace.profile import Profile, Rank


@dataclass(frozen=True)
class Case:
    profile: Profile
    settings: Mapping[str, Any] | None = None
    """By dot-key, of the run that was profiled; None for a trace from elsewhere, of which no setting is known."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Of the clean run: what may be quoted as a time."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """environment.json of the run, as dot-keys."""
    overhead: float | None = None
    """Time of a recorded step over that of a clean one, less 1; None where no clean step does the same."""

    @property
    def rank(self) -> Rank:
        """The one that is looked at when one has to do: the lowest."""
        return self.profile.ranks[0]

    def fix(self, **overrides: Any) -> dict[str, Any]:
        """As `findings.fix` has it."""
        return findings.fix(self.settings, **overrides)

    def setting(self, key: str) -> Any:
        """None where it is not known, or the command has no such setting."""
        return None if self.settings is None else self.settings.get(key)
