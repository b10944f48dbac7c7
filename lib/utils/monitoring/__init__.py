"""What a run shows: machinery, you need not read it.

logger.py              one place that feeds the terminal, metrics.jsonl and TensorBoard
console.py             log files, and the progress bar
metrics.py             sums over samples and processes, the best evaluation, metrics.jsonl
throughput.py          samples per second, waiting for data, memory
tensorboard.py         writes event files
tensorboard_server.py  -tb: shows them in a browser
tunnel.py              -ngrok: shows them to others
images.py              sample pictures and the confusion matrix
profiler.py            -profile
startup.py             how long the start takes
"""
