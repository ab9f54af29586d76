"""XLA's options for programs of tests that are compiled often and run briefly.

Without LLVM's optimizations a program compiles in a half to two thirds of the time. Integers come
out the same, and floats within the tolerance that a test allows another order of sums. XLA's own
passes are as always, so that a test that reads a program's HLO reads what users get.
"""

QUICK = {"xla_backend_optimization_level": 0}
