"""Stop strings in streamed text: what may be shown now, and when the text has ended.

Text comes in pieces. The stop that ends earliest wins, the longest of those that end together; a
stop may lie across pieces. Text that may be the beginning of a stop is held back until it is known
not to be.
"""

from collections.abc import Sequence


class StopStrings:
    """Feed pieces to `add`; once `stopped` names a stop, the text is complete."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.stopped: str | None = None

    def add(self, piece: str, *, may_stop: bool = True) -> str:
        """Text that can be shown now. With `may_stop` false no stop ends within this piece."""
        if self.stopped is not None:
            return ""
        text, first_end = self._held + piece, len(self._held) + 1
        if may_stop and (found := self._first(text, first_end)) is not None:
            start, self.stopped = found
            self._held = ""
            return text[: start + len(self.stopped)] if self._include else text[:start]
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, once nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str, first_end: int) -> tuple[int, str] | None:
        """(start, stop) of the stop that ends first, at `first_end` or later."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(first_end - len(stop), 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of the text with which a stop begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
