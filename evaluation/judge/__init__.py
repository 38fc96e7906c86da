"""MT-Bench style judging by a language model: any OpenAI-compatible endpoint, FastChat's file formats.

`python -m evaluation.judge single|pairwise|show`. Answer files, questions, references, judge prompts and judgments are
FastChat's, so its tools read what this writes and the other way round. Unlike there, any judge may have any name, an
API error is never stored as a judgment, and a run that was interrupted goes on where it stopped.
"""
