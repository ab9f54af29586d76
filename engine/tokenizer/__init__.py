"""Text to token ids and back: HF directories, GGUF files, chat templates, streamed text.

`load_tokenizer(path)` reads either kind; everything after it is the same object, so an offline
call, a server and a test that hold equal files get equal ids.
"""

from engine.tokenizer.detokenizer import Detokenizer
from engine.tokenizer.gguf import tokenizer_from_gguf
from engine.tokenizer.load import load_tokenizer
from engine.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer", "tokenizer_from_gguf"]
