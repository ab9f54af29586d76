"""A model's vocabulary: text to ids, ids to text, messages to ids.

A thin class around `tokenizers.Tokenizer`, which does the encoding and decoding; here are the
checks at the border, the ids that end a text, the chat templates and the streaming decoder. Text
and ids are plain Python strings and ints. The invariant: `encode` gives the ids of the HF
tokenizer of the same model, and nothing (no padding, truncation or clean-up) alters text or ids.
"""

from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from engine.tokenizer.chat_template import ChatTemplates
from engine.tokenizer.detokenizer import Detokenizer, checked_ids, decoding_rule


class Tokenizer:
    """Made by `load_tokenizer` or `tokenizer_from_gguf`.

    `vocab_size` is the model's, where the files tell it: ids from the last token up to it are
    padding, which a model can emit and which has no text. `special_tokens` maps the names that
    chat templates use ("bos_token", "eos_token", ...) to token text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int],
        chat_templates: Mapping[str, str],
    ):
        # A tokenizer.json may carry settings of the training run, which would cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._rule = decoding_rule(backend)
        self._templates = ChatTemplates(chat_templates, special_tokens)
        self._special_tokens = dict(special_tokens)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        return self._templates.names

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; `add_special_tokens` adds BOS or EOS where the model's own rule does.

        The text of a special token inside `text` becomes that token, as in HF by default: text
        from a user can therefore end a turn or open one. Who must not allow that removes it first.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; an id without a token, nothing."""
        ids = checked_ids(ids, self.vocab_size)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A stream whose pieces of text add up to `decode` of all ids pushed to it."""
        skipped_ids = self.special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._backend, self._rule, self.vocab_size, skipped_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt that the model's template writes for `messages`.

        With `tools` the template named "tool_use" is taken where there is one, else "default".
        `variables` are handed to the template as they are (`enable_thinking=False`).
        """
        return self._templates.render(messages, add_generation_prompt, tools, variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> list[int]:
        """Ids of exactly what the template says: BOS is there if, and only if, it writes it."""
        prompt = self.apply_chat_template(messages, add_generation_prompt, tools, **variables)
        return self.encode(prompt, add_special_tokens=False)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has an unpaired surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}: it is not Unicode text; decode the input with errors='replace'"
        ) from error
