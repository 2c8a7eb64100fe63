"""What all strategies share: a run, its batches and reports, and the progress of its workers."""
