"""Plans and schedules: pure functions, without PyTorch and MPI."""
