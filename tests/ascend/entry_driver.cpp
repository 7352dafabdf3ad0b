// Calls entry points as torch_npu's compiled code does, with a stand-in for Python, and prints what arrives.
#include <cstdint>
#include <cstdio>
#include <cstring>

#define SHOWN extern "C" __attribute__((visibility("default")))

SHOWN void sim_configure(const char*, const char*, int, uint64_t, int64_t, int64_t, int64_t);
SHOWN void sim_callbacks(int64_t (*)(int, const int64_t*, int64_t), int (*)(int64_t), void (*)());
SHOWN void sim_define(int, const char*);
SHOWN const char* aclGetRecentErrMsg();
SHOWN void* aclCreateTensor(const int64_t*, uint64_t, int, const int64_t*, int64_t, int, const int64_t*, uint64_t, void*);
SHOWN void* aclCreateFloatArray(const float*, uint64_t);
SHOWN void* aclCreateScalar(const void*, int);

SHOWN int aclnnManyGetWorkspaceSize(const void* tensor, double d1, int64_t big, bool yes, const char* text, float f1,
                                    const void* scalar, int32_t narrow, int8_t tiny, int16_t little, double d2, double d3,
                                    double d4, double d5, double d6, double d7, double d8, float f2, const void* array,
                                    const void* absent, int64_t last, uint64_t* workspace, void** executor);
SHOWN int aclnnMany(void* workspace, uint64_t size, void* executor, void* stream);
SHOWN int aclnnUnknownGetWorkspaceSize(const void* tensor, int64_t number, uint64_t* workspace, void** executor);

static int64_t prepare(int operation, const int64_t* words, int64_t count) {
    printf("prepare %d:", operation);
    for (int64_t i = 0; i < count; ++i) printf(" %lld", static_cast<long long>(words[i]));
    printf("\n");
    return 41;
}
static int execute(int64_t executor) {
    printf("execute %lld\n", static_cast<long long>(executor));
    return 7;
}

// What the simulator looks for in a process that runs Python.
SHOWN int Py_IsInitialized() { return 1; }
SHOWN int PyGILState_Ensure() { return 0; }
SHOWN void PyGILState_Release(int) {}
SHOWN int PyRun_SimpleStringFlags(const char*, void*) {
    sim_configure("AscendTest", "8.5.0", 1, 1 << 20, 1, 2, 3);
    sim_callbacks(prepare, execute, nullptr);
    sim_define(0, "tdibsfkjyhdddddddfati");
    return 0;
}

int main() {
    const int64_t shape[] = {2, 3}, strides[] = {3, 1}, storage[] = {6};
    void* tensor = aclCreateTensor(shape, 2, 0, strides, 5, 2, storage, 1, nullptr);
    const float numbers[] = {0.5f, -2.0f};
    void* array = aclCreateFloatArray(numbers, 2);
    const int64_t value = -9;
    void* scalar = aclCreateScalar(&value, 9);
    uint64_t workspace = 99;
    void* executor = nullptr;
    const int code = aclnnManyGetWorkspaceSize(tensor, 1.5, INT64_MIN, true, "layout", 2.5f, scalar, -7, -8, -300, 2.0, 3.0,
                                               4.0, 5.0, 6.0, 7.0, 8.0, 9.5f, array, nullptr, 1234567890123,
                                               &workspace, &executor);
    printf("returned %d, workspace %llu\n", code, static_cast<unsigned long long>(workspace));
    printf("ran %d\n", aclnnMany(nullptr, 0, executor, nullptr));
    printf("unknown %d: ", aclnnUnknownGetWorkspaceSize(tensor, 12, &workspace, &executor));
    printf("%s\n", aclGetRecentErrMsg());
    return 0;
}
