"""Pure functions of numbers and tensors: no files, no processes, no distributed state."""
