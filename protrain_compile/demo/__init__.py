"""The demo behind `protrain demo`: a byte-level GPT trained on real text."""
