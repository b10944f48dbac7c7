"""What a run shows: the terminal, metrics.jsonl, TensorBoard, trackers."""
