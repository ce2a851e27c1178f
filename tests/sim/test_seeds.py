"""Numbers derived from words."""

from hypothesis import given, strategies as st

from streamoff.sim.seeds import derive

Words = list[int | str]

words = st.lists(st.one_of(st.integers(), st.text()), max_size=4)


def test_a_number_is_the_same_everywhere() -> None:
    """The mixing is part of the reproducibility of old reports, so it may not change unnoticed."""
    assert derive(1, "train", 2, "site-3") == 14772017944031657841


@given(words, words)
def test_different_words_give_different_numbers(left: Words, right: Words) -> None:
    """No two lists of words collide by being joined: ("ab",) is not ("a", "b"), and 1 is not "1"."""
    assert (derive(*left) == derive(*right)) == (
        [(type(word), word) for word in left] == [(type(word), word) for word in right]
    )
