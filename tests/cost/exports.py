"""Hand-written exports of profilers, each with the oddities its reader must live with."""

from __future__ import annotations

import json
import sqlite3

# Names a machine must not leave in a table of samples.
SECRETS = ("gpu-box-7", "mallory", "/home/", "secret.py")

NCU_2025 = '''==PROF== Connected to process 4711 (/home/mallory/python3.12)
loss 3.14, done
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description","Estimated Speedup Type","Estimated Speedup"
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","Mbyte","2.33",
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","1,024",
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","Command line profiler metrics","flop_count_hp.sum","","n/a",
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","GPU Speed Of Light Throughput","Memory Throughput","%","41.5",
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","GPU Speed Of Light Throughput","Duration","us","9,096.60",
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","SpeedOfLight","","","","SOLBottleneck","OPT","Small grid","global","12.5"
"0","4711","python3.12","gpu-box-7","flash_fwd_splitkv_kernel<int, 128>(Params)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","Memory Workload Analysis","Memory Throughput","Gbyte/s","412.3",
"1","4711","python3.12","gpu-box-7","my_odd_kernel(int)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","GPU Speed Of Light Throughput","Duration","ns","900",
"2","4711","python3.12","gpu-box-7","ampere_gemm(int)","1","7","(32, 4, 1)","(224, 1, 1)","0","9.0","GPU Speed Of Light Throughput","Duration","us","n/a",
==WARNING== No section files found
'''  # fmt: skip

NCU_2023 = '''"ID","Process ID","Process Name","Host Name","Kernel Name","Kernel Time","Context","Stream","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"0","1","python3","gpu-box-7","fmha_fwd_loop_kernel<int>(P)","2023-May-09 15:23:06","1","7","Command line profiler metrics","dram__bytes.sum","Kbyte","32.77",
"0","1","python3","gpu-box-7","fmha_fwd_loop_kernel<int>(P)","2023-May-09 15:23:06","1","7","Command line profiler metrics","sm__cycles_elapsed.avg","cycle","12,904",
"0","1","python3","gpu-box-7","fmha_fwd_loop_kernel<int>(P)","2023-May-09 15:23:06","1","7","Command line profiler metrics","sm__cycles_elapsed.avg.per_second","cycle/nsecond","1.29",
'''  # fmt: skip

NCU_RAW = '''"ID","Process Name","Host Name","Kernel Name","Device","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","","","","Mbyte","Kbyte","us"
"0","python3","gpu-box-7","flash_fwd_kernel<int>(P)","0","134.2","512","48.2"
"1","python3","gpu-box-7","flash_fwd_kernel<int>(P)","0","268.4","512","1,093.5"
'''  # fmt: skip

NSYS_CSV = """Processing [/home/mallory/run.sqlite] with [cuda_gpu_kern_sum.py]...
SKIPPED: /home/mallory/run.sqlite does not contain CUDA memcpy data.
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
60.1,"5,500,000",1000,5500.0,5500.0,5400,5600,10.0,"void flash::flash_fwd_splitkv_kernel<T<(int)128, (bool)0>>(P)"
30.2,3200000,1000,3200.0,3200.0,3100,3300,10.0,"void flash::flash_fwd_splitkv_combine_kernel<T<(int)128>>(P)"
9.9,100000,10,10000.0,10000.0,9000,11000,10.0,my_odd_kernel
"""


def nsys_sqlite(path, kernels=True, bad_text=True):
    """An export: kernels that overlap, copies, a GPU; tables are absent when nothing was recorded."""
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE TARGET_INFO_GPU (name TEXT, memoryBandwidth INT, smCount INT, l2CacheSize INT, totalMemory INT)")
    db.execute("INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA A100-SXM4-40GB', 1555200000000, 108, 41943040, 42297524224)")
    db.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
    db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('UserName', 'mallory')")
    if kernels:
        db.execute("CREATE TABLE StringIds (id INT, value TEXT)")
        db.execute("INSERT INTO StringIds VALUES (1, 'void flash_fwd_kernel<int>(P)')")
        db.execute("INSERT INTO StringIds VALUES (2, CAST(? AS TEXT))", (b"gemm_\xff\xfe" if bad_text else b"gemm_x",))
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, demangledName INT, shortName INT)")
        ran = [(1000, 11000, 1), (6000, 16000, 1), (20000, 21000, 2), (30000, 30000, 1)]  # two overlap, one takes no time
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 0)", ran)
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, bytes INT, copyKind INT)")
        db.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?)",
            [(0, 27000, 884736, 1), (0, 9000, 884736, 1), (0, 5, 64, 8)],
        )
    db.commit()
    db.close()
    return path


def kernel(name, ts, dur, correlation=1, grid=True, stream=7):
    args = {"stream": stream, "correlation": correlation, "est. achieved occupancy %": 0} | (
        {"grid": [8, 1, 1], "block": [128, 1, 1]} if grid else {}
    )
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def launch(ts, correlation):
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "dur": 5, "args": {"correlation": correlation}}


def annotation(name, ts, dur):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "args": {}}


STEP_32 = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32768sqsq32sqsk32768)"


def kineto(*events):
    """A trace whose own name and Python frames hold paths."""
    frame = {"ph": "X", "cat": "python_function", "name": "/home/mallory/secret.py(3): step", "ts": 0, "dur": 1000}
    return {
        "traceEvents": [frame, *events],
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936, "numSms": 132}],
        "displayTimeUnit": "ns",
        "traceName": "/home/mallory/trace.json",
    }


DECODE = kineto(
    annotation(STEP_32, 0, 100),
    annotation("step[DECODE bs=32]", 10, 80),
    launch(20, 1),
    launch(400, 2),
    kernel("void paged_attention_v2<int>(P)", 200, 50.0, grid=False),
    kernel("void paged_attention_v2_reduce<int>(P)", 240, 20.0, grid=False),  # starts before the first ends
    kernel("Cijk_gemm", 260, 100.0, grid=False),
    kernel("my_odd_kernel", 360, 15.0, grid=False),
    kernel("void flash_fwd_kernel<int>(P)", 500, 30.0, correlation=2),  # of no annotated step
    kernel("void flash_fwd_kernel<int>(P)", 540, 9e15, correlation=2),
    kernel("void flash_fwd_kernel<int>(P)", 560, -4.0, correlation=2),
)

PROTON = [
    {
        "frame": {"name": "ROOT", "type": "function"},
        "metrics": {"count": 0, "time (ns)": 0},
        "children": [
            {
                "frame": {"name": "/home/mallory/secret.py", "type": "function"},
                "metrics": {},
                "children": [
                    {
                        "frame": {"name": "/home/mallory/attn_fwd", "type": "function"},
                        "metrics": {"time (ns)": 204800, "count": 10, "bytes": 1e8, "device_id": "0"},
                        "children": [],
                    },
                    {"frame": {"name": "foo", "type": "function"}, "metrics": {"time (ns)": 204800, "count": 1}, "children": []},
                ],
            }
        ],
    },
    {"CUDA": {"0": {"arch": "89", "bus_width": 384, "memory_clock_rate": 10501000, "num_sms": 128}}},
]

AIC = """framework,version,device,op_name,kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,step,window_size,latency
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,4,1,32,8,128,bfloat16,bfloat16,1023,0,0.05
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,4,1,32,8,128,bfloat16,fp8,1023,128,0.02
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,512,1,32,8,128,bfloat16,bfloat16,8191,0,1.0
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,8,1,32,8,128,bfloat16,bfloat16,1023,0,0.05
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,8,1,32,8,128,bfloat16,bfloat16,1023,0,0.09
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,2,1,32,8,128,bfloat16,bfloat16,1023,0,0.001
VLLM,0.19.0,NVIDIA H200,generation_attention,vllm_flash_attn,1,1,32,8,128,bfloat16,bfloat16,1023,0,
"""

LLMSERVINGSIM = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,4,1024,25.5
512,0,4,1024,125.5
512,0,0,0,100.0
"""

GEOMETRY = json.dumps({"layers": 36, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16"})
