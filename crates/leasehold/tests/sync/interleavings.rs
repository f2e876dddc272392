//! Interleavings, driven step by step.
