"""The HLO reader on a module written by hand: regions, loops, sources, copies, collectives."""

import pytest

from sharding.hlo import collectives, copies_of, program

MODULE = """HloModule jit_f, is_scheduled=true

FileNames
1 "engine/step.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} sine(%p)
}

%flag_condition (c: (pred[], f32[8])) -> pred[] {
  %c = (pred[], f32[8]{0}) parameter(0)
  ROOT %g = pred[] get-tuple-element(%c), index=0
}

%maybe (c.1: (pred[], f32[8])) -> (pred[], f32[8]) {
  %c.1 = (pred[], f32[8]{0}) parameter(0)
  %x.1 = f32[8]{0} get-tuple-element(%c.1), index=1
  %no = pred[] constant(false)
  %twice = f32[8]{0} fusion(%x.1), kind=kLoop, calls=%fused
  %copy.1 = f32[8]{0} copy(%twice)
  ROOT %t.1 = (pred[], f32[8]{0}) tuple(%no, %copy.1)
}

%count_condition (c.2: (s32[], f32[8])) -> pred[] {
  %c.2 = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c.2), index=0
  %n = s32[] constant(9)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%serial (c.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c.3 = (s32[], f32[8]{0}) parameter(0)
  %x.3 = f32[8]{0} get-tuple-element(%c.3), index=1
  %i.3 = s32[] get-tuple-element(%c.3), index=0
  %all-reduce.1 = f32[8]{0} all-reduce(%x.3), to_apply=%fused
  ROOT %t.3 = (s32[], /*index=1*/f32[8]{0}) tuple(%i.3, %all-reduce.1)
}

ENTRY %main (a: f32[8], flag: pred[]) -> f32[8] {
  %a = f32[8]{0:T(256)} parameter(0)
  %flag = pred[] parameter(1)
  %sum = f32[8]{0:T(256)} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/sin" stack_frame_id=1}
  %first = (pred[], f32[8]{0}) tuple(%flag, %sum)
  %while.1 = (pred[], f32[8]{0}) while(%first), condition=%flag_condition, body=%maybe
  %b = f32[8]{0} get-tuple-element(%while.1), index=1
  %zero = s32[] constant(0)
  %second = (s32[], f32[8]{0}) tuple(%zero, %b)
  %while.2 = (s32[], f32[8]{0}) while(%second), condition=%count_condition, body=%serial, backend_config={"known_trip_count":{"n":"9"}}
  %copy-start.5 = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%b)
  %copy-done.5 = f32[8]{0} copy-done(%copy-start.5)
  ROOT %d = f32[8]{0} get-tuple-element(%while.2), index=1
}
"""  # noqa: E501 - as the compiler prints it


def test_operations_are_what_the_device_starts():
    main = program(MODULE)
    assert [(op.name, op.opcode, op.shape) for op in main.ops] == [
        ("sum", "fusion", "f32[8]"),
        ("copy-start.5", "copy", "(f32[8], f32[8], u32[])"),
    ]
    assert main.ops[0].operand_shapes == ("f32[8]",)
    assert main.ops[0].source == "engine/step.py:12 jit(f)/sin"
    assert main.count() == 5


def test_a_loop_that_reads_a_flag_is_told_from_one_that_counts():
    maybe, serial = program(MODULE).regions
    assert (maybe.kind, maybe.trips, [op.name for op in maybe.ops]) == (
        "when",
        None,
        ["twice", "copy.1"],
    )
    assert (serial.kind, serial.trips, [op.opcode for op in serial.ops]) == (
        "loop",
        9,
        ["all-reduce"],
    )


def test_collectives_and_copies_are_found_wherever_they_stand():
    main = program(MODULE)
    assert collectives(main) == {"all-reduce": 1}
    assert [op.name for op in copies_of(main, {"f32[8]"})] == ["copy-start.5", "copy.1"]
    assert copies_of(main, {"f32[9]"}) == []


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        program("nothing")
