"""The compiled library: found, loaded, refused, linked, packaged, and called from C++."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from sample import make_sample

import torch_ropepool

ROOT = Path(__file__).parent.parent
PACKAGE = Path(torch_ropepool.__file__).parent
MACOS = sys.platform == "darwin"


def run_python(code: str, path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], env=environment, cwd=path, capture_output=True, text=True
    )


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A copy of the package to damage, in a folder of its own."""
    shutil.copytree(
        PACKAGE, tmp_path / "torch_ropepool", ignore=shutil.ignore_patterns("csrc", "__pycache__")
    )
    return tmp_path


def import_error(path: Path, before: str = "") -> str:
    """The text of the ImportError of `import torch_ropepool`, with paths and the torch version left out."""
    code = (
        f"import torch\n{before}\ntry:\n  import torch_ropepool\nexcept ImportError as error:\n  print(error)"
    )
    result = run_python(code, path)
    assert result.returncode == 0, result.stderr
    assert result.stdout, "the import worked"
    return (
        result.stdout.strip().replace(str(path), "PATH").replace(torch_ropepool.library_path().suffix, ".so")
    )


def library_in(path: Path) -> Path:
    return path / "torch_ropepool" / torch_ropepool.library_path().name


# ---- Finding and loading


def test_library_path_is_beside_the_package():
    assert torch_ropepool.library_path().parent == PACKAGE
    assert torch_ropepool.library_path().is_file()


def test_missing_library(package_copy):
    library_in(package_copy).unlink()
    assert_expected_inline(
        import_error(package_copy),
        """torch_ropepool's compiled library is missing (PATH/torch_ropepool/librope_pool.so): build it for this machine and torch: pip install --no-build-isolation --force-reinstall --no-deps torch_ropepool""",
    )


def test_a_library_elsewhere_is_not_taken(package_copy):
    """Not from the working folder, nor from the loader's path."""
    library_in(package_copy).rename(package_copy / library_in(package_copy).name)
    before = (
        f"import os; os.environ['LD_LIBRARY_PATH'] = os.environ['DYLD_LIBRARY_PATH'] = {str(package_copy)!r}"
    )
    assert "is missing" in import_error(package_copy, before)


def test_library_that_does_not_load(package_copy):
    library_in(package_copy).write_bytes(b"not a library")
    message = import_error(package_copy)
    assert message.startswith("torch_ropepool's compiled library does not load (")
    assert "pip install --no-build-isolation" in message


def test_library_of_another_version(package_copy):
    version = package_copy / "torch_ropepool" / "_version.py"
    version.write_text('__version__ = "0.0.1"\n')
    message = import_error(package_copy)
    assert message.startswith(
        f"torch_ropepool is 0.0.1, but its compiled library (PATH/torch_ropepool/librope_pool.so) is "
        f"{torch_ropepool.__version__}: build it"
    )


def plant(path: Path, source: str) -> None:
    """A library of this C++ source in place of the one at `path`."""
    path.unlink(missing_ok=True)
    compiler = os.environ.get("CXX", "c++")
    undefined = ["-undefined", "dynamic_lookup"] if MACOS else []
    command = [compiler, "-shared", "-fPIC", *undefined, "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def test_library_that_needs_what_this_torch_has_not(package_copy):
    """What a mismatch of torch's C interface looks like: the missing function is named."""
    plant(library_in(package_copy), 'extern "C" int torch_future(); int x = torch_future();')
    message = import_error(package_copy)
    assert message.startswith("torch_ropepool's compiled library does not load (")
    assert "torch_future" in message
    assert "build it for this machine and torch: pip install" in message


def test_a_library_that_is_not_ours(package_copy):
    plant(library_in(package_copy), "")
    assert import_error(package_copy).startswith(
        "PATH/torch_ropepool/librope_pool.so is not torch_ropepool's compiled library: build it"
    )


def test_cuda_library_of_another_version(package_copy):
    cuda_library = library_in(package_copy).with_stem("librope_pool_cuda")
    plant(cuda_library, 'extern "C" const char* rope_pool_version() { return "0.0.1"; }')
    message = import_error(package_copy, "torch.version.cuda = '13.0'")
    assert message.startswith(
        f"torch_ropepool is {torch_ropepool.__version__}, but its compiled library "
        "(PATH/torch_ropepool/librope_pool_cuda.so) is 0.0.1: build it"
    )


def test_a_second_copy_in_one_process(package_copy):
    """torch would let its kernels replace the first one's."""
    first = f"torch.ops.load_library({str(torch_ropepool.library_path())!r})"
    assert import_error(package_copy, first) == (
        "this process has loaded another copy of torch_ropepool's compiled library already, so it cannot "
        "load PATH/torch_ropepool/librope_pool.so: import one copy only"
    )


def test_the_library_may_be_loaded_before_the_package(package_copy):
    code = f"import torch; torch.ops.load_library({str(library_in(package_copy))!r}); import torch_ropepool"
    result = run_python(code, package_copy)
    assert result.returncode == 0, result.stderr


WINDOWS = "torch_ropepool does not run on Windows: use it in WSL, the Windows Subsystem for Linux"


def test_windows_is_refused_by_name(package_copy):
    assert import_error(package_copy, "import sys; sys.platform = 'win32'") == WINDOWS


def test_windows_is_refused_by_name_at_the_build():
    code = "import runpy, sys; sys.platform = 'win32'; runpy.run_path('setup.py')"
    result = run_python(code, ROOT)
    assert (result.returncode, result.stderr) == (1, WINDOWS + "\n")


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0+cu117", "2.0"])
def test_torch_that_is_too_old(package_copy, version):
    message = import_error(package_copy, f"torch.__version__ = {version!r}")
    assert message == f"torch_ropepool needs torch >= 2.10, found {version}: pip install 'torch>=2.10'"


@pytest.mark.parametrize("version", ["2.10.0", "2.14.1+cpu", "3.0.0a0+git1234"])
def test_torch_that_is_new_enough(package_copy, version):
    result = run_python(
        f"import torch; torch.__version__ = {version!r}; import torch_ropepool; print('loaded')", package_copy
    )
    assert result.stdout == "loaded\n", result.stderr


def test_import_is_light():
    code = """
import sys, torch
before = set(sys.modules)
import torch_ropepool
new = {name for name in set(sys.modules) - before if not name.startswith("torch_ropepool")}
print(sorted(name for name in new if name.partition(".")[0] not in sys.stdlib_module_names))
print(torch.cuda.is_initialized())
"""
    result = run_python(code, PACKAGE.parent)
    assert result.stdout == "[]\nFalse\n", result.stdout + result.stderr


# ---- What the library is linked to


def tool_output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_links_no_python():
    library = str(torch_ropepool.library_path())
    linked = tool_output("otool", "-L", library) if MACOS else tool_output("readelf", "-d", library)
    assert "torch" in linked
    assert "python" not in linked.lower()


def test_needs_only_the_c_shim_of_torch():
    """The stable ABI: no C++ symbol of torch, which another release may not have."""
    library = str(torch_ropepool.library_path())
    output = tool_output("nm", "-u", library) if MACOS else tool_output("nm", "-D", "-u", library)
    symbols = [line.split()[-1].partition("@")[0] for line in output.splitlines() if line.strip()]
    of_torch = [symbol for symbol in symbols if "torch" in symbol or "c10" in symbol or "2at" in symbol]
    assert of_torch
    assert [s for s in of_torch if not s.lstrip("_").startswith(("aoti_torch_", "torch_"))] == []
    assert [s for s in symbols if s.lstrip("_").startswith("Py")] == []


# ---- Building and packaging


def source_copy(tmp_path: Path) -> Path:
    copy = tmp_path / "source"
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.so", "*.dylib", "*.egg-info"),
    )
    return copy


def test_wheel(tmp_path):
    """One wheel per platform for every Python 3, with the library and all Python files in it, no more."""
    copy = source_copy(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)],
        check=True,
        cwd=copy,
        env={**os.environ, "PATH": path, "TORCH_ROPEPOOL_CUDA": "0"},  # which would take long
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(
        rf"torch_ropepool-{re.escape(torch_ropepool.__version__)}-py3-none-(linux|macosx)\w+\.whl",
        wheel.name,
    )
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "torch_ropepool").rglob("*.py")}
    assert names == modules | {f"torch_ropepool/{torch_ropepool.library_path().name}"}


def test_build_without_torch_says_what_to_do(tmp_path):
    code = """
import sys
sys.modules["torch"] = None
sys.argv = ["setup.py", "build_ext"]
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__name__": "__main__", "__file__": "setup.py"})
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert_expected_inline(
        result.stderr.strip(),
        """\
torch_ropepool is built against the torch that is installed, and there is none.
Install torch >= 2.10 and ninja, then run: pip install --no-build-isolation .""",
    )


# ---- C++ without Python

CALLER = r"""
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <cstdio>

int main(int, char** argv) {
  if (dlopen(argv[1], RTLD_NOW) == nullptr) return std::printf("%s\n", dlerror()), 1;
  at::NoGradGuard no_grad;
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("ropepool::_rope_pool_fused", "");
  at::Tensor q = at::arange(2 * 2 * 4, at::kFloat).view({2, 2, 4}), k = q.narrow(1, 0, 1), v = -k;
  at::Tensor k_pool = at::zeros({3, 1, 4}), v_pool = at::zeros({3, 1, 4});
  auto call = [&](int64_t head_dim) {
    torch::jit::Stack stack{q, k, v, at::arange(5, 7, at::kLong), at::tensor({2, 0}, at::kInt), k_pool,
                            v_pool, head_dim, 2, 1, 10000.0};
    const auto& arguments = op.schema().arguments();
    while (stack.size() < arguments.size()) stack.push_back(*arguments[stack.size()].default_value());
    op.callBoxed(stack);
    return stack;
  };
  for (const auto& result : call(4)) {
    const at::Tensor flat = result.toTensor().contiguous();
    for (int64_t i = 0; i < flat.numel(); ++i) std::printf("%.9g\n", flat.data_ptr<float>()[i]);
  }
  for (const at::Tensor& pool : {k_pool, v_pool}) {
    for (int64_t i = 0; i < pool.numel(); ++i) std::printf("%.9g\n", pool.data_ptr<float>()[i]);
  }
  try {
    call(6);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
}
"""


def test_called_from_cpp_without_python(tmp_path):
    from torch.utils.cpp_extension import include_paths, library_paths

    source, program = tmp_path / "caller.cpp", tmp_path / "caller"
    source.write_text(CALLER)
    libraries = library_paths()
    subprocess.run(
        [
            *(os.environ.get("CXX", "c++"), "-std=c++20", "-O0", str(source), "-o", str(program)),
            *(f"-I{path}" for path in include_paths()),
            *(f"-L{path}" for path in libraries),
            *(f"-Wl,-rpath,{path}" for path in libraries),
            *("-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
        ],
        check=True,
    )
    linked = tool_output("otool", "-L", str(program)) if MACOS else tool_output("ldd", str(program))
    assert "torch_cpu" in linked
    assert "libpython" not in linked

    output = tool_output(str(program), str(torch_ropepool.library_path())).splitlines()
    q = torch.arange(16.0).view(2, 2, 4)
    call = make_sample(2, 2, 1, 4, 3).with_(
        q=q,
        k=q[:, :1],
        v=-q[:, :1],
        positions=torch.arange(5, 7),
        slots=torch.tensor([2, 0]),
        k_pool=torch.zeros(3, 1, 4),
        v_pool=torch.zeros(3, 1, 4),
    )
    expected = torch.cat([t.flatten() for t in call.run()])
    assert torch.equal(torch.tensor([float(line) for line in output[:-1]]), expected)
    assert output[-1].startswith("q shape must be [num_tokens, num_qo_heads, head_dim], got [2, 2, 4] with")
