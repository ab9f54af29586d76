"""Stop strings: small cases by hand, and any split of a text against a search of the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stop_strings import StopStrings


def feed(pieces, stops, include=False, may_stop=None):
    """(pieces shown, stop found)."""
    stream = StopStrings(stops, include)
    allowed = may_stop or [True] * len(pieces)
    shown = [stream.add(p, may_stop=a) for p, a in zip(pieces, allowed, strict=True)]
    if stream.stopped is None:
        shown.append(stream.finish())
    return shown, stream.stopped


def expected(text, stops, include):
    """Earliest end, then longest: every position of the whole text is tried."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "text"),
    [(["DE"], "ABC"), (["CDE"], "AB"), (["Z"], "ABCDEFx"), (["DE", "CDEF"], "ABC")],
)
def test_b27_stop_across_and_inside_pieces(stops, text):
    for pieces in (["AB", "CD", "EFx"], ["ABCDEFx"], list("ABCDEFx")):
        assert "".join(feed(pieces, stops)[0]) == text


def test_b27_included_stop_ends_the_text():
    assert "".join(feed(["AB", "CD", "EFx"], ["DE"], include=True)[0]) == "ABCDE"
    assert "".join(feed(["AB", "CD", "EFx"], ["DE"], include=False)[0]) == "ABC"


def test_b27_only_what_may_begin_a_stop_is_held_back():
    stream = StopStrings(["CDE"])
    assert [stream.add(p) for p in ("AB", "C", "D", "X", "C", "C", "Y")] == [
        "AB",
        "",
        "",
        "CDX",
        "",
        "C",
        "CY",
    ]
    assert stream.finish() == ""


def test_text_held_back_at_the_end_is_not_lost():
    assert feed(["abc", "EN"], ["END"]) == (["abc", "", "EN"], None)


def test_of_two_stops_that_end_together_the_longest_wins():
    assert feed(["ABCDE"], ["DE", "CDE"]) == (["AB"], "CDE")


def test_no_stop_ends_where_it_may_not():
    # The first stop lies in text that may not stop; the second begins there and ends after it.
    shown, stop = feed(["xEN", "D yEN", "D z"], ["END"], may_stop=[False, False, True])
    assert ("".join(shown), stop) == ("xEND y", "END")


def test_nothing_is_shown_after_the_stop():
    stream = StopStrings(["."])
    assert [stream.add(p) for p in ("a.b", "c")] == ["a", ""]
    assert stream.stopped == "."


def test_without_stops_everything_flows():
    assert feed(["a", "b"], []) == (["a", "b", ""], None)


words = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet="abc", max_size=5), max_size=8), st.lists(words, max_size=4))
def test_any_split_gives_the_text_and_the_stop_of_the_whole(pieces, stops):
    for include in (False, True):
        shown, stop = feed(pieces, stops, include)
        assert ("".join(shown), stop) == expected("".join(pieces), stops, include)
