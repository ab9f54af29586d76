"""`LLM`: the front door. A model by name, prompts in, texts out, one engine underneath."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine import beam_search, checkpoint
from engine.beam_search import BeamSearchOutput, BeamSearchParams
from engine.checks import check_flag, check_kind
from engine.engine_args import EngineArgs, network_engine
from engine.metrics import Metrics
from engine.outputs import RequestOutput
from engine.platform import enable_compilation_cache, resolve_dtype
from engine.prompts import Prompt, as_list, conversations, encoded, with_settings
from engine.recording import FileRecorder
from engine.sampling_params import SamplingParams
from engine.sampling_rows import bad_word_ids_of
from engine.text import RequestText
from engine.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint.load import load_model, read_config
from models.checkpoint.registry import resolve
from models.config import ModelConfig
from models.model import ModelParams


class LLM:
    """An offline engine with vLLM's interface; `engine_args` are the fields of `EngineArgs`.

    model      short name, directory, .gguf file or Hugging Face id
    tokenizer  another model's path; None: the model's own
    dtype      auto, float32 or bfloat16
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | Path | None = None,
        *,
        dtype: str = "auto",
        compilation_cache: bool = True,
        **engine_args: Any,
    ):
        args = EngineArgs(**engine_args)
        check_kind("model", model, str | Path, "a name or a path")
        check_kind("tokenizer", tokenizer, str | Path | None, "a name or a path")
        check_flag("compilation_cache", compilation_cache)
        weights_dtype = resolve_dtype(dtype)
        if compilation_cache:
            enable_compilation_cache()
        path = resolve(model)
        loaded = load_tokenizer(path if tokenizer is None else resolve(tokenizer))
        args.engine_config(read_config(path), weights_dtype)  # refuses before weights are read
        config, params = load_model(path, weights_dtype)
        self._setup(config, params, loaded, args, str(model))

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: ModelParams,
        tokenizer: Tokenizer | None = None,
        *,
        name: str | None = None,
        **engine_args: Any,
    ) -> "LLM":
        """An engine for parameters that are in memory; records call them `name`.

        Without a tokenizer prompts are token ids and outputs have no text.
        """
        check_kind("config", config, ModelConfig, "a ModelConfig")
        check_kind("params", params, ModelParams, "ModelParams")
        check_kind("name", name, str | None, "a string")
        self = cls.__new__(cls)
        self._setup(config, params, tokenizer, EngineArgs(**engine_args), name or config.family)
        return self

    def _setup(
        self, config, params, tokenizer: Tokenizer | None, args: EngineArgs, name: str
    ) -> None:
        self.model_config, self.tokenizer = config, tokenizer
        dtype = params.embed_VD.dtype
        sizes, limits = args.engine_config(config, dtype), args.sampling_limits(config)
        recorder = None
        if args.record is not None:
            about = {"model": name, "dtype": dtype.name, "attention_impl": args.attention_impl}
            recorder = FileRecorder(args.record, about)
        eos = set(config.eos_token_ids) | set(tokenizer.eos_token_ids if tokenizer else ())
        self.engine = network_engine(
            config,
            params,
            sizes,
            limits,
            args.attention_impl,
            eos_token_ids=sorted(eos),
            rounds=args.steps_per_dispatch,
            overlap=args.overlap,
            recorder=recorder,
            seed=args.seed,
        )
        self._next_request = 0
        self._open: dict[str, RequestText] = {}  # whose last output nobody has been given yet

    # ---- requests ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. Every prompt is checked before any work is done."""
        requests = self._requests(prompts, sampling_params, priority)
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc="requests", disable=not use_tqdm) as bar:
            for output, _ in self._serve(requests):
                if output.finished:
                    finished[output.request_id] = output
                    bar.update()
        return [finished[request_id] for request_id in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[RequestOutput, dict[int, str]]]:
        """Yield (request so far, new text by choice index) as dispatches come back.

        Leaving the iterator early aborts what is unfinished.
        """
        return Stream(self, self._requests(prompts, sampling_params, None))

    def chat(
        self,
        messages: Sequence[Mapping] | Sequence[Sequence[Mapping]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; `template` goes to the chat template."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template")
        prompts = [self.tokenizer.encode_chat(m, **template) for m in conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def save_state(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save everything as it stands between two outputs of `stream`; nothing is disturbed."""
        prompts = {request_id: request.prompt for request_id, request in self._open.items()}
        choices = {id_: [text.choice for text in r.texts] for id_, r in self._open.items()}
        note = {"prompts": prompts, "next_request": self._next_request}
        checkpoint.save(self.engine, path, also=choices, note=note, overwrite=overwrite)

    def resume(self, path: str | Path) -> "Stream":
        """Go on from `save_state` in an idle engine of the same model and settings.

        Yields like `stream`, for all requests that were out; the first news of each choice brings
        its text from the beginning.
        """
        if self._open:
            raise ValueError("outputs of a stream are still to be read; read or close it first")
        choices, note = checkpoint.load(self.engine, path, accept=self._check_resumed)
        self._next_request = note["next_request"]
        self._open = {
            id_: RequestText(prompt, choices[id_], self.tokenizer)
            for id_, prompt in note["prompts"].items()
        }
        return Stream(self, dict(self._open))

    def _check_resumed(self, requests: checkpoint.Requests) -> None:
        for request_id, choices in requests.items():
            if choices[0].params.stop and self.tokenizer is None:
                raise ValueError(
                    f"request {request_id} has stop strings, which need a tokenizer; resume with "
                    "the one it was saved with"
                )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The best `params.beam_width` continuations of each prompt, in the prompts' order."""
        prompts = [self._encode(prompt) for prompt in as_list(prompts)]
        found: dict[int, BeamSearchOutput] = {}
        with tqdm(total=len(prompts), desc="searches", disable=not use_tqdm) as bar:
            requests = [(ids, salt) for _, ids, salt in prompts]
            for i, sequences in beam_search.run(self.engine, requests, params, self._request_id):
                for sequence in sequences if self.tokenizer else ():
                    sequence.text = self.tokenizer.decode(sequence.tokens, False)
                found[i] = BeamSearchOutput(sequences)
                bar.update()
        return [found[i] for i in range(len(prompts))]

    def get_metrics(self) -> Metrics:
        """Counts since the start, how full the cache is now, and the latencies of finished requests
        and of dispatches (mean, P50, P95, P99); see `Metrics`."""
        return self.engine.metrics()

    def _requests(self, prompts, sampling_params, priority) -> dict[str, "RequestText"]:
        requests: dict[str, RequestText] = {}
        complete = False
        try:
            for i, asked in enumerate(with_settings(prompts, sampling_params, priority)):
                request_id = self._request_id()
                try:
                    requests[request_id] = self._add(request_id, *asked)
                except ValueError as error:
                    raise ValueError(f"prompts[{i}]: {error}") from error
            complete = True
        finally:
            if not complete:
                self._abort(requests)
        return requests

    def _request_id(self) -> str:
        self._next_request += 1
        return str(self._next_request - 1)

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int):
        check_kind("sampling_params", params, SamplingParams, "SamplingParams")
        text, ids, salt = self._encode(prompt)
        if params.truncate_prompt_tokens is not None:
            keep = params.truncate_prompt_tokens
            keep = self.engine.config.max_model_len - 1 if keep == -1 else keep
            ids = ids[-keep:]
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise ValueError("stop strings and bad words need a tokenizer")
        bad_words = ()
        if params.bad_words:
            bad_words = bad_word_ids_of(
                params.bad_words, lambda t: self.tokenizer.encode(t, add_special_tokens=False)
            )
        choices = self.engine.add_request(
            request_id, ids, params, priority=priority, salt=salt, bad_word_ids=bad_words
        )
        try:
            self._open[request_id] = RequestText(text, choices, self.tokenizer)
        except BaseException:  # the tokenizer is the caller's, and may do anything
            self.engine.abort(request_id)
            raise
        return self._open[request_id]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int], Any]:
        return encoded(prompt, self.tokenizer.encode if self.tokenizer else None)

    # ---- serving -------------------------------------------------------------------------------

    def _serve(self, requests: dict[str, "RequestText"]):
        try:
            active = [(id_, text) for id_, r in requests.items() for text in r.texts]
            while True:
                # Not a step's own news: another iterator may have read what is ours.
                for request_id, text in active:
                    if not text.has_news:
                        continue
                    delta = text.take()
                    if text.output.finish_reason and text.choice.finish_reason is None:
                        self.engine.end(text.choice, "stop")
                    output = requests[request_id].output(request_id)
                    if output.finished:
                        del self._open[request_id]
                    yield output, {text.choice.index: delta}
                active = [item for item in active if not item[1].output.finish_reason]
                if not active:
                    return
                self.engine.step()
        finally:
            self._abort(requests)

    def _abort(self, requests: dict[str, "RequestText"]) -> None:
        for request_id, request in requests.items():
            self._open.pop(request_id, None)
            for text in request.texts:
                if text.choice.finish_reason is None:
                    self.engine.end(text.choice, "abort")


class Stream(Iterator):
    """Outputs of some requests as they come; closed or dropped early, it aborts what is left."""

    def __init__(self, llm: LLM, requests: "dict[str, RequestText]"):
        self._llm, self._requests = llm, requests
        self._outputs = llm._serve(requests)

    def __next__(self) -> tuple[RequestOutput, dict[int, str]]:
        return next(self._outputs)

    def close(self) -> None:
        self._outputs.close()
        self._llm._abort(self._requests)  # a generator that never began runs no clean-up

    def __del__(self) -> None:
        self.close()
