"""What recipes share stands in one place, and how a selection is undone does not."""

import pytest

from curax import advantage, aggregate, correct, loss
from curax.config import Config, ConfigError, Sampling, load
from curax.settings.config_paths import describe
from curax.testbed import SELECTION, embedded

# The least that a recipe says.
RECIPE = """
from curax import advantage, aggregate, gate, loss
from curax.config import Config, Sampling
from curax.testbed import embedded

def get_config() -> Config:
    return embedded(
        sampling=Sampling(),
        advantage=advantage.group_mean,
        loss=loss.clipped_ratio,
        aggregate=aggregate.token_mean,{more}
    )
"""


def bed(**fields) -> Config:
    """The test bed, under a recipe that says no more than it has to."""
    return embedded(
        sampling=Sampling(),
        advantage=advantage.group_mean,
        loss=loss.clipped_ratio,
        aggregate=aggregate.token_mean,
        **fields,
    )


@pytest.mark.parametrize("field", SELECTION)
def test_a_recipe_that_selects_says_how_that_is_undone(field):
    chosen = {field: getattr(bed(), field)}
    said = f"^correct is not set, but {field} may select; set correct to what"
    with pytest.raises(ConfigError, match=said):
        bed(**chosen)
    whole = bed(**chosen, correct=correct.none)
    assert describe(whole) == describe(bed())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("gate=gate.zero_variance", "correct is not set, but gate may select; "),
        ("gatte=gate.zero_variance", "TypeError: .* argument 'gatte'"),
        ("steps=-1", "steps=-1 must be at least 0"),
    ],
)
def test_a_wrong_field_is_named_with_the_line_of_the_recipe(tmp_path, more, said):
    file = tmp_path / "mine.py"
    file.write_text(RECIPE.format(more=f"\n        {more},"))
    with pytest.raises(ConfigError, match=rf"mine\.py:7: {said}"):
        load(file)
