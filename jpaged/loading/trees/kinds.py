"""All kinds of trees that are known, in the order in which they are tried."""

from jpaged.loading.trees.gemma import GEMMA
from jpaged.loading.trees.hugging_face import HUGGING_FACE
from jpaged.loading.trees.maxtext import MAXTEXT
from jpaged.loading.trees.table import Kind
from jpaged.loading.trees.tunix import TUNIX

KINDS: tuple[Kind, ...] = (HUGGING_FACE, TUNIX, MAXTEXT, GEMMA)
