"""What a recipe says of other machines."""

from __future__ import annotations

from jali import Entropy
from jali.evaluation.tuning.outcome import elsewhere
from jali.integration.recipe import RunSize


def test_a_forecast_is_of_calls_that_the_model_was_fitted_to() -> None:
    """Small ones take as long on a GPU as it takes to launch them, which nobody measured."""
    wan = elsewhere("wan-t2v-1.3b", RunSize(50, 480, 832, 81, 5.0), Entropy(), 0.3)
    assert 1.2 < wan["NVIDIA H200"] < 2.5
    nano = elsewhere("nano", RunSize(12, 128, 128, 33, 4.0), Entropy(), 0.574)
    assert "NVIDIA H200" not in nano
    assert 0.5 < nano["cpu"] < 2
