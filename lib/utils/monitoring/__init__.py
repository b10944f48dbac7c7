"""What a run shows: machinery, you need not read it.

logger.py              the terminal, metrics.jsonl, TensorBoard; log_training chooses a log line's figures
console.py             log files, the progress bar and its figures (FORMATS), the format of a log line
metrics.py             sums over samples and processes, the best evaluation, metrics.jsonl
throughput.py          samples per second, waiting for data, time left, memory
tensorboard.py         TensorBoard's event file
tensorboard_server.py  -tb: TensorBoard's server; -ngrok: a tunnel to it
trackers.py            -track: starts scripts/track.py
images.py              samples, the model's answers and the confusion matrix as images
startup.py             starts and ends a process quickly
"""
