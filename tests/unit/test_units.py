"""Numbers of tokens as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualdecoder.errors import ConfigError
from dualdecoder.units import parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("0", 0), ("7", 7), ("128K", 131072), ("128k", 131072), (" 1M ", 1048576), ("1.5K", 1536), ("0.5m", 524288)],
)
def test_what_is_understood(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@given(st.integers(0, 10**12))
def test_numbers_mean_themselves_and_k_is_1024(number: int) -> None:
    assert parse_tokens(number) == parse_tokens(str(number)) == number
    assert parse_tokens(f"{number}K") == 1024 * number
    assert parse_tokens(f"{number}M") == 1024 * parse_tokens(f"{number}K")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "K",
        "-1",
        "1.3",
        "0.0001K",
        "128KB",
        "1e5",
        "1_000",
        "128 K",
        "\uff11\uff12",
        "9" * 5_000,
        None,
        True,
        2.0,
        [1],
        "nan",
    ],
)
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^context=.* is not allowed; allowed: a whole number of tokens") as error:
        parse_tokens(value, "context")
    assert "\n" not in str(error.value)
