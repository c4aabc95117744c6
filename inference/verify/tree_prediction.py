"""What a tree of drafts will accept, given the text that comes out: exact for every shape, from laws and ranks.

Given the text, a round stays on it while it accepts: at a node whose path is the text so far, the text's next token is
accepted as the node's child number c with a chance that the laws there decide (`by_rank`, `by_draw`). Shapes only say
which children there are. So one table of these chances gives `reach` of every topology, and calls and their variance
follow as for chains (`prediction`).

B rows, T positions, C children, D levels, V vocabulary. accept (B, T, C): P(the text's token t is accepted as child c,
0-based | the text, children are tried at its node); with a third axis, (B, T, K, C), when it is drafted at depth j
(0-based), that is by a round that starts at t - j; entries with j > t are never read, nor tokens past a row's length.
"""

import torch
from torch import Tensor

from inference.noise import CHILDREN, uniform
from inference.sampling import draw, wide
from inference.verify.prediction import aligned, calls_from, lengths_of, variance_from
from inference.verify.tree import depths_of, ranks_of
