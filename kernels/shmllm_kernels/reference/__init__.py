"""What each operation computes, in torch.

They return new tensors and leave their inputs as they were, but where a docstring says
otherwise. Knows no kernels: those are tested against this.
"""
