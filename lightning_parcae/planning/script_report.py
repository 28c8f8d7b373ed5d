"""What a script that runs under ``parcae profile`` tells the command, as one JSON value.

The script's process writes it whenever it has come further, so that the command can say how far a script came that has
failed or hangs. Pure: reading and writing the file is done by both sides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_parcae.planning.profile import ModelProfile, profile_from_json

REPORT_VARIABLE = "PARCAE_PROFILE_REPORT"
"""Environment variable with the path of the report. Where it is set, ParcaeStrategy measures, then ends the script."""

STEPS_VARIABLE = "PARCAE_PROFILE_STEPS"
"""Environment variable with the number of training steps to measure."""

Reached = Literal["nothing", "strategy", "fit", "layers", "steps"]


@dataclass(frozen=True)
class ScriptReport:
    """How far a script has come, and what was measured of it.

    Attributes:
        reached: ``strategy`` (a ParcaeStrategy was made), ``fit`` (it was set up), ``layers`` (they were measured, the
            steps begin) or ``steps`` (all is measured).
        refusal: Why the script cannot be trained as it is; None if nothing was refused.
        profile: What was measured.
        layer_names: Kind of each layer, for people.
        device: Where it was measured.
        num_steps: Steps that the measured step time is the median of; 0 if there were too few.
        other_s: Part of that step time that is not forward and backward: data, hooks, the optimizer.
        is_guessed: Whether the layers could not be run one by one, so that their times are guesses.
    """

    reached: Reached = "nothing"
    refusal: str | None = None
    profile: ModelProfile | None = None
    layer_names: tuple[str, ...] = ()
    device: str = "cpu"
    num_steps: int = 0
    other_s: float = 0.0
    is_guessed: bool = False

    def to_json(self) -> str:
        """Return the report as text."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "profile"}
        return json.dumps({**values, "profile": None if self.profile is None else self.profile.to_json()})

    @classmethod
    def from_json(cls, text: str) -> ScriptReport:
        """Build a report from :meth:`to_json`'s text.

        Raises:
            ValueError: If the text is no report.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            profile = None if values["profile"] is None else profile_from_json(values["profile"])
            if values["reached"] not in get_args(Reached) or not (profile is None or isinstance(profile, ModelProfile)):
                raise ValueError(f"a script cannot have reached {values['reached']!r}")
            values["layer_names"] = tuple(values["layer_names"])
            return cls(**{**values, "profile": profile})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a report of a script: {type(error).__name__}: {error}") from error
