"""The definition of each operation in torch. The kernels are tested against it.

The functions return new tensors and do not change their inputs, unless a docstring says so. This
package must not know the kernels.
"""
