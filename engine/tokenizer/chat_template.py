"""Chat messages to prompt text by the model's own jinja template.

In: a list of messages (mappings with "role" and whatever else the template reads). Out: the prompt
string, exactly as the template writes it. The template comes with the weights and is not trusted:
it runs in jinja's immutable sandbox, where it can neither change its inputs nor reach Python's
internals, and its failures arrive as ValueError. The surroundings (block trimming, loop controls,
`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`) are those that model authors write
for, which transformers' documentation on chat templates defines.
"""

import datetime
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

# What a template that meets a message it was not written for raises besides jinja's own errors.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    RecursionError,
)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; a prompt has just its content."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(format):
    return datetime.datetime.now().strftime(format)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplates:
    """The named templates of one model, compiled when first used.

    `special_tokens` are the names a template may write (`bos_token`, `eos_token`, ...); a name the
    model lacks is undefined in the template, which renders as nothing.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]):
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> str:
        name = self._choose(tools)
        inputs = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": _checked_messages(messages),
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self._templates[name])
            return self._compiled[name].render(inputs)
        except _RENDER_ERRORS as error:
            raise ValueError(
                f"chat template {name!r} failed: {error} "
                "(check the roles, their order and the content types of the messages)"
            ) from error

    def _choose(self, tools) -> str:
        if not self._templates:
            raise ValueError(
                "this model has no chat template: give it plain text instead of messages, or put "
                "a chat_template.jinja beside tokenizer.json"
            )
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"no chat template named {name!r}; the model has {list(self.names)}")
        return name


def _checked_messages(messages) -> list[dict]:
    """The messages as plain dicts; a key whose value is None is dropped, as templates expect."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a non-empty list of mappings, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"a message must be a mapping with a role, got {message!r}")
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _checked_tools(tools) -> list[dict] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas (mappings), got {tools!r}")
    return [dict(tool) for tool in tools]
