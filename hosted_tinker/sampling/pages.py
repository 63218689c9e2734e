"""Pages of the key-value cache: which are free, and how many hold each."""

from __future__ import annotations


class PageAllocator:
    """Hands out pages 1 to `num_pages - 1`; page 0 stays empty, for padding to point at.

    A page is free when its last holder has released it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A page with one holder. There must be a free one."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Adds a holder to a page that has one."""
        assert self._holders[page] > 0
        self._holders[page] += 1

    def release(self, page: int) -> None:
        self._holders[page] -= 1
        assert self._holders[page] >= 0
        if self._holders[page] == 0:
            self._free.append(page)

    def count_holders(self, page: int) -> int:
        return self._holders[page]
