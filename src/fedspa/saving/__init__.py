"""What is written so that a run can go on: checkpoints, and files that are whole or not there."""
