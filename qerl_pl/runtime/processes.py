"""What the processes of one machine share: variables that workers get, and CPU cores."""

import os
import re
from collections.abc import Iterable

_PASSED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *(
            "LANG",
            "LANGUAGE",
            "LC_ALL",
            "LC_CTYPE",
            "LC_COLLATE",
            "LC_MESSAGES",
            "LC_MONETARY",
            "LC_NUMERIC",
            "LC_TIME",
        ),
        *("PYTHONHASHSEED", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONUTF8"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS", "PYTHONIOENCODING"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"),
        *(
            "CUDA_VISIBLE_DEVICES",
            "CUDA_HOME",
            "TRITON_INTERPRET",
            "TOKENIZERS_PARALLELISM",
            "QERL_CACHE",
            "QERL_DEBUG",
        ),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "NLTK_DATA"),
        *("TRANSFORMERS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    )
)
"""Variables that programs need to run, and that hold no secrets."""
_PASSWORD = re.compile(r"://[^/\s]*@")
"""A URL with a password, as of a proxy."""


def worker_variables(names: Iterable[str] = ()) -> dict[str, str]:
    """Variables of the environment for worker processes: those that programs need to run, and no tokens.

    Args:
        names: Further variables to pass.
    """
    named = set(names)
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (name in _PASSED and not _PASSWORD.search(value))
    }


def cores() -> int:
    """CPU cores that this process may use, divided by the ranks on its machine, unless SLURM has divided them."""
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        available = os.cpu_count() or 1
    if available < int(os.environ.get("SLURM_CPUS_ON_NODE", 0)):
        return available
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
