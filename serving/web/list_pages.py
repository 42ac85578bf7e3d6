"""Pages of a list, as in OpenAI's API."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from jpaged.errors import RequestError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class PageQuery:
    """The query of a page. after: id of the item before the page; None: the page is the first one."""

    after: str | None
    limit: int
    ascending: bool

    @classmethod
    def read(cls, given: Mapping[str, str], default: int, most: int) -> "PageQuery":
        """Read `after`, `limit` and `order`. default, most: of the limit. Raises RequestError."""
        limit, order = given.get("limit", str(default)), given.get("order", "desc")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= most):
            raise RequestError("limit", limit, f"must be 1 to {most:,}")
        if order not in ("asc", "desc"):
            raise RequestError("order", order, "must be asc or desc")
        return cls(given.get("after"), int(limit), order == "asc")

    def cut(self, oldest_first: Sequence[T], id_of: Callable[[T], str], what: str) -> tuple[list[T], bool]:
        """Return the items of the page, and whether there are more. what: an item, for the error of an unknown id."""
        items = list(oldest_first if self.ascending else reversed(oldest_first))
        start = 0
        if self.after is not None:
            place = next((i for i, item in enumerate(items) if id_of(item) == self.after), None)
            if place is None:
                raise RequestError("after", self.after, f"must be the id of {what}")
            start = place + 1
        return items[start : start + self.limit], start + self.limit < len(items)
