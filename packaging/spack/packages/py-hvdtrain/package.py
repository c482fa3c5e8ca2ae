# ruff: noqa: F403, F405 - the imports that Spack prescribes
"""Spack package of hvdtrain, with a Horovod built by hvdtrain for Spack's PyTorch and MPI.

In the root of this repository:

    spack repo add packaging/spack
    spack dev-build py-hvdtrain@0.3.0

Horovod's source is downloaded from PyPI while the package is built.
"""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHvdtrain(PythonPackage):
    """Trains image classifiers on many processes and explains what it got for them."""

    license("Apache-2.0")

    version("0.3.0")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake", type="build")
    depends_on("gmake", type="build")
    depends_on("py-pip", type="build")
    depends_on("py-setuptools@68:", type="build")
    depends_on("py-wheel", type="build")

    depends_on("mpi", type=("build", "link", "run"))
    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-mpi4py@4:")
        depends_on("py-torch@2.10:2")
        depends_on("py-numpy@2:")
        depends_on("py-cffi@1.16:")
        depends_on("py-cloudpickle@3:")
        depends_on("py-packaging@23:")
        depends_on("py-psutil@5.9:")
        depends_on("py-pyyaml@6:")
    with default_args(type="run"):
        depends_on("py-filelock@3.24:")
        depends_on("py-h5py@3.10:")
        depends_on("py-ml-dtypes@0.5:")
        depends_on("py-jsonargparse@4.53:4 +signatures")
        depends_on("py-shtab")
        depends_on("py-rich@13:")
        depends_on("py-tensorboard@2.18:")
        depends_on("py-markdown@3.5:")
        depends_on("py-matplotlib@3.8:")
        depends_on("py-pillow@11:")
        depends_on("py-scipy@1.11:")
        depends_on("py-nvidia-ml-py@12.535:")
        depends_on("py-submitit@1.5.2:1")

    @run_after("install")
    def install_horovod(self):
        """Build Horovod for this PyTorch and MPI, and install it beside hvdtrain."""
        cache = join_path(self.stage.path, "hvdtrain-cache")
        options = ["--build-only", "--mpi", "system", "--no-tensorflow", "--cache", cache]
        with working_dir(self.stage.source_path):
            wheel = python("-m", "hvdtrain.setup", *options, output=str).strip()
            pip("install", "--no-deps", "--no-index", f"--prefix={self.prefix}", wheel)
