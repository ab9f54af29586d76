"""How a sequence's positions are cut into blocks of keys that can be gathered from pages.

Block j is `pages` whole pages, or one of `parts` parts of a page that is larger than a block. Every
position belongs to exactly one block.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KeyBlocks:
    page_size: int
    pages: int
    keys_per_page: int

    @property
    def parts(self) -> int:
        return -(-self.page_size // self.keys_per_page)

    def block_of(self, x: jax.Array) -> jax.Array:
        """The block that holds position x."""
        return x // (self.pages * self.page_size) * self.parts + (
            x % self.page_size // self.keys_per_page
        )

    def locate(self, block_W: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Page table columns [W, p], offset in those pages [W], and positions [W, B].

        The last part of a page is moved back so as not to cross the page's end; positions that
        the part before it already holds are given as -1.
        """
        column_Wp = (block_W // self.parts * self.pages)[:, None] + jnp.arange(self.pages)
        begin_W = block_W % self.parts * self.keys_per_page
        offset_W = jnp.minimum(begin_W, self.page_size - self.keys_per_page)
        offset_Wc = offset_W[:, None] + jnp.arange(self.keys_per_page)
        x_Wpc = column_Wp[:, :, None] * self.page_size + offset_Wc[:, None, :]
        x_Wpc = jnp.where((offset_Wc >= begin_W[:, None])[:, None, :], x_Wpc, -1)
        return column_Wp, offset_W, x_Wpc.reshape(block_W.shape[0], -1)


def key_blocks(page_size: int, keys: int) -> KeyBlocks:
    """Blocks of at most `keys` positions."""
    return KeyBlocks(page_size, max(1, keys // page_size), min(page_size, keys))
