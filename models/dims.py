"""The one legend of dimension letters used in array names, einsum strings and declarations.

T  tokens of the flat ragged batch (all slots' new tokens, then padding)
S  slots (one admitted sequence each)
M  columns of the page table (pages per sequence at most)
P  pages in the pool; page 0 is the trash page
C  positions per page
X  positions of a dense view (M * C)
D  model width
F  MLP width
N  query heads
K  key/value heads
G  query heads per key/value head (N = K * G)
H  head width
A  all query heads' channels side by side (N * H)
R  rotated channels of a head (R <= H)
V  vocabulary
E  rows of a learned position table
"""

# What each letter means to sharding; a letter that is absent is never sharded.
LOGICAL_AXES = {
    "V": "vocab",
    "D": "embed",
    "F": "mlp",
    "N": "heads",
    "A": "heads",
    "K": "kv_heads",
    "H": "head_dim",
    "E": "positions",
}
