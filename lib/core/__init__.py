"""What a run is built of: loss, optimizer, schedule, DDP and FSDP, sums over processes, and -eval."""
