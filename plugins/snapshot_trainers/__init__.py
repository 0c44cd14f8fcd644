"""Trainers: Lightning, transformers, accelerate, torchtitan, torchtune, Ray and others."""
