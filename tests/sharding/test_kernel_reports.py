"""Reading what libtpu and ptxas print, on samples."""

from sharding.kernel_reports import GpuKernel, TpuKernel, gpu_kernels, tpu_kernels

BUNDLES = """
// kernel
     0x0   :  { %1 = vnop }
     0x1 LB: > { %s2 = sadd.s32 1, %s1  ;;  %17 = sbr.rel (!%p15) target = $region81 }
     0x2   : >> { %v3 = vld [vmem:[#allocation3] sm:$0xff] }
     0x3 PF: > { %v4 = vadd.f32 %v3, %v3 } /* End region 4 */
     0x4   :  {}
"""

PTXAS = """I1129 compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 48 bytes cumulative stack size, 8320 bytes smem
ptxas info    : Compile time = 4.249 ms
ptxas info    : Compiling entry function 'combine' for 'sm_90a'
ptxas info    : Function properties for combine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers
ptxas info    : Compile time = 2.555 ms
"""

THUNKS = """001: kWhile [source | next=002 (1)] while.3
  001: kCustomKernel [source | sink ] attend grid: [33, 8, 1] threads: [128, 2, 1]  shared_memory: 39168 bytes
002: kCustomKernel [prev=001 (1)] loop_add_fusion grid: [64, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501


def test_bundles_are_counted_by_the_loops_around_them(tmp_path):
    (tmp_path / "179-attend.1-71-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "179-attend.1-70-schedule-analysis_final_bundles.txt").write_text("total: 5")
    (tmp_path / "180-fusion.2-71-final_bundles.txt").write_text(BUNDLES)
    assert tpu_kernels(tmp_path, {"attend.1"}) == [TpuKernel("attend.1", 5, (2, 2, 1))]


def test_ptxas_reports_are_read_per_kernel_and_the_launch_adds_shared_memory():
    attend, combine = gpu_kernels(PTXAS, THUNKS)
    assert attend == GpuKernel(
        "attend", registers=168, spill_bytes=40, stack_bytes=48, shared_bytes=47_488, threads=256
    )
    assert combine == GpuKernel(
        "combine", registers=14, spill_bytes=0, stack_bytes=0, shared_bytes=0, threads=None
    )


def test_kernels_come_in_the_order_in_which_they_are_started():
    launches = "".join(
        f"00{i}: kCustomKernel {name} grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes\n"
        for i, name in enumerate(("combine", "attend", "combine"))
    )
    names = [kernel.name for kernel in gpu_kernels(PTXAS, launches)]
    assert names == ["combine", "attend", "combine"]
    assert [kernel.name for kernel in gpu_kernels(PTXAS, "")] == ["attend", "combine"]
