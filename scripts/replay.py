"""Send a record's dispatches again: `python scripts/replay.py FILE --model smollm2-135m`.

Exit status 0: every token is the record's; 1: one is not, and the first is named; 2: bad input. The
weights and the dtype are the caller's to choose, so a record also compares two models' arithmetic.
"""

import argparse
import sys
from pathlib import Path

from engine.cli import add_model_arguments, find_model, run
from engine.engine_args import network_engine
from engine.identity import differences
from engine.recording import FileRecorder, check_record_path, read_record
from engine.replay import replay


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a record, as LLM(record=...) writes it")
    add_model_arguments(parser)
    parser.add_argument("--record", help="write the replay's own record to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.record and Path(args.record).resolve() == Path(args.file).resolve():
        raise ValueError(f"--record {args.record} is the record to replay; name another file")
    if args.record:
        check_record_path(args.record)
    record = read_record(args.file)
    found = find_model(args)
    if found.config.vocab_size != record.limits.vocab_size:
        raise ValueError(
            f"{args.model} has {found.config.vocab_size} tokens, the record was made with "
            f"{record.limits.vocab_size}; name the record's model: {record.about}"
        )
    model = found.load()
    recorder = FileRecorder(args.record, record.about) if args.record else None
    attention = str(record.about.get("attention_impl", "auto"))
    engine = network_engine(
        model.config, model.params, record.config, record.limits, attention, recorder=recorder
    )
    for difference in differences(record.identity, engine.identity()):
        print(f"note: {difference} (recorded with {record.about})", file=sys.stderr)
    result = replay(engine, record)
    if result.difference is not None:
        print(f"different: {result.difference}")
        sys.exit(1)
    if result.num_open:
        print(f"note: {result.num_open} requests go on where the record ends", file=sys.stderr)
    schedule = "the same" if result.same_schedule else "another"
    print(
        f"identical: {result.num_tokens} tokens of {result.num_requests} requests in "
        f"{len(record.dispatches)} dispatches, {schedule} schedule"
    )


if __name__ == "__main__":
    run(main)
