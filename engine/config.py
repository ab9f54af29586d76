"""The static sizes and policies of an engine: what its compiled programs are made for."""

from dataclasses import dataclass
from typing import Literal

from engine.checks import check_flag, check_one_of, check_size

# (least, most) of each size: sums of them stay within 32 bits on the device. Page 0 is trash.
SIZES = {
    "max_num_seqs": (1, 2**16),
    "num_slots": (1, 2**17),
    "max_model_len": (2, 2**28),  # a prompt token and one to generate
    "num_pages": (2, 2**29),
    "page_size": (1, 2**20),
    "token_budget": (1, 2**24),
    "max_rounds": (1, 2**10),
    "inbox_size": (1, 2**17),
    "inbox_tokens": (1, 2**30),
    "max_stop_ids": (0, 2**10),
    "admissions_per_round": (1, 2**16),
}
POLICIES = ("continuous", "static")
MAX_TOKENS = 2**31 - 1  # tokens that running requests may hold


def program_budgets(token_budget: int) -> tuple[int, ...]:
    """Token budgets of the engine's programs, ascending. A pass of less than 32 tokens is hardly
    cheaper, and some kernels take such calls with fewer page sizes."""
    return (*(b for b in (token_budget // 8, token_budget // 4) if b >= 32), token_budget)


@dataclass(frozen=True)
class EngineConfig:
    """Static sizes and policies. `num_pages` counts the trash page.

    `token_budget` is the most prompt tokens of a round, the width of the prefill pass.
    `policy` `static` admits only when no request runs (the classic baseline).
    """

    max_num_seqs: int
    num_slots: int
    max_model_len: int
    num_pages: int
    page_size: int = 16
    token_budget: int = 256
    max_rounds: int = 8
    inbox_size: int = 16
    inbox_tokens: int = 4096
    max_stop_ids: int = 8
    admissions_per_round: int = 8
    enable_prefix_caching: bool = True
    policy: Literal["continuous", "static"] = "continuous"

    def __post_init__(self) -> None:
        for name, (low, high) in SIZES.items():
            check_size(name, getattr(self, name), low, high)
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        if self.num_slots < self.max_num_seqs:
            raise ValueError(
                f"num_slots {self.num_slots} must be at least max_num_seqs {self.max_num_seqs}"
            )
        most = self.max_num_seqs * self.pages_per_seq * self.page_size
        if most > MAX_TOKENS:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} of max_model_len {self.max_model_len} in pages "
                f"of {self.page_size} are {most:,} tokens, at most {MAX_TOKENS:,} can be counted; "
                "lower one of them"
            )
        if self.inbox_tokens < self.max_model_len:
            raise ValueError(
                f"inbox_tokens {self.inbox_tokens} must hold a prompt of max_model_len "
                f"{self.max_model_len}"
            )
        check_one_of("policy", self.policy, POLICIES)

    @property
    def program_budgets(self) -> tuple[int, ...]:
        return program_budgets(self.token_budget)

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)
