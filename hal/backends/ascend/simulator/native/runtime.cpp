// The runtime of the simulated CANN: devices, memory, streams, events. Device memory is host memory; every stream has
// finished whatever it was given by the time the call returns, or has it kept for a graph (capture.cpp).
#include "simulator.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int POISON = 0xFF;        // reads as NaN in every float type, as -1 in the integers
constexpr uint64_t ALIGNMENT = 512;
constexpr uint64_t RELEASE = 1 << 20;  // freed blocks of this size and more give their pages back

thread_local int current_device = -1;
std::atomic<uint32_t> devices_in_use{0};  // a bit for each that was set in any thread

// One range of addresses for the memory of all devices: the Python side views it as one tensor for each dtype.
class Arena {
public:
    bool open() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (base_) return true;
        const auto& configuration = sim_configuration();
        size_ = configuration.memory * configuration.devices;
        void* found = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return false;
        base_ = static_cast<char*>(found);
        for (int device = 0; device < configuration.devices; ++device) {
            free_.push_back({{device * configuration.memory, configuration.memory}});
            used_.push_back(0);
        }
        return true;
    }

    void* take(int device, uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t wanted = (std::max<uint64_t>(bytes, 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        auto& holes = free_[device];
        for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
            if (hole->second < wanted) continue;
            const auto [start, length] = *hole;
            holes.erase(hole);
            if (length > wanted) holes[start + wanted] = length - wanted;
            taken_[start] = {device, wanted};
            used_[device] += wanted;
            memset(base_ + start, POISON, wanted);
            return base_ + start;
        }
        return nullptr;
    }

    bool give(void* pointer) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = taken_.find(static_cast<char*>(pointer) - base_);
        if (!base_ || found == taken_.end()) return false;
        auto start = found->first;
        auto [device, length] = found->second;
        taken_.erase(found);
        used_[device] -= length;
        if (length >= RELEASE) madvise(base_ + start, length, MADV_DONTNEED);
        auto& holes = free_[device];
        auto next = holes.lower_bound(start);
        if (next != holes.end() && start + length == next->first) {
            length += next->second;
            next = holes.erase(next);
        }
        if (next != holes.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == start) {
                before->second += length;
                return true;
            }
        }
        holes[start] = length;
        return true;
    }

    bool holds(const void* pointer) const {
        auto address = static_cast<const char*>(pointer);
        return base_ && address >= base_ && address < base_ + size_;
    }

    int device_of(const void* pointer) const {
        if (!holds(pointer)) return -1;
        return static_cast<int>((static_cast<const char*>(pointer) - base_) / sim_configuration().memory);
    }

    uint64_t used(int device) {
        std::lock_guard<std::mutex> lock(mutex_);
        return base_ ? used_[device] : 0;
    }

    char* base() const { return base_; }
    uint64_t size() const { return size_; }

private:
    std::mutex mutex_;
    char* base_ = nullptr;
    uint64_t size_ = 0;
    std::vector<std::map<uint64_t, uint64_t>> free_;  // by device: start -> length
    std::vector<uint64_t> used_;
    struct Block { int device; uint64_t length; };
    std::unordered_map<uint64_t, Block> taken_;
};

// Never destroyed: torch frees device memory while the process ends.
Arena& arena() {
    static Arena& instance = *new Arena;
    return instance;
}

aclError take(void** pointer, size_t bytes) {
    if (current_device < 0) return NO_CONTEXT;
    if (!arena().open()) {
        sim_set_error("simulated CANN: the address range of the device memory cannot be reserved; ask for less memory");
        return OUT_OF_MEMORY;
    }
    *pointer = arena().take(current_device, bytes);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

enum Direction { host_to_host, host_to_device, device_to_host, device_to_device };

bool fits(size_t bytes, size_t room) {
    if (bytes > room) sim_set_error("simulated CANN: a copy of more bytes than its destination holds");
    return bytes <= room;
}

aclError copy(void* target, const void* source, size_t bytes, bool asynchronous) {
    if (bytes) memmove(target, source, bytes);
    const int direction = 2 * arena().holds(source) + arena().holds(target);
    sim_note(Event::copy, direction, static_cast<int64_t>(bytes), asynchronous);
    return SUCCESS;
}

// Host memory that a device reaches by itself: start -> end.
class Pinned {
public:
    void add(void* pointer, size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        blocks_[static_cast<char*>(pointer)] = static_cast<char*>(pointer) + bytes;
    }
    void remove(void* pointer) {
        std::lock_guard<std::mutex> lock(mutex_);
        blocks_.erase(static_cast<char*>(pointer));
    }
    bool holds(const void* pointer) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto after = blocks_.upper_bound(static_cast<const char*>(pointer));
        return after != blocks_.begin() && pointer < std::prev(after)->second;
    }

private:
    std::mutex mutex_;
    std::map<const char*, const char*> blocks_;
};

Pinned& pinned() {
    static Pinned& instance = *new Pinned;
    return instance;
}

bool reachable(const void* pointer) { return arena().holds(pointer) || pinned().holds(pointer); }

double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

struct RecordedEvent { double at = 0; };

// Contexts are numbers: one a device.
void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(0x1000 + device)); }

bool is_device(int device) { return sim_ready() && device >= 0 && device < sim_configuration().devices; }

}  // namespace

int sim_device_of(const void* pointer) { return arena().device_of(pointer); }

EXPORT void* sim_arena(uint64_t* size) {
    if (!arena().open()) return nullptr;
    *size = arena().size();
    return arena().base();
}
EXPORT uint64_t sim_used(int device) { return arena().used(device); }

// ---- process, devices, contexts ----
EXPORT void sim_initialised();
EXPORT aclError aclInit(const char*) {
    if (!sim_ready()) return FAILURE;
    sim_initialised();
    return SUCCESS;
}
EXPORT aclError aclFinalize() { return SUCCESS; }
EXPORT const char* aclrtGetSocName() { return sim_ready() ? sim_configuration().soc.c_str() : nullptr; }
EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = 0;
    if (!sim_ready()) return FAILURE;
    *count = sim_configuration().devices;
    return SUCCESS;
}
EXPORT aclError aclrtSetDevice(int device) {
    if (!is_device(device)) return INVALID_DEVICE;
    current_device = device;
    devices_in_use |= 1u << device;
    return SUCCESS;
}
// torch_npu takes a device without an answer for one in use, and then wants its streams.
EXPORT aclError aclrtGetPrimaryCtxState(int device, uint32_t*, int* active) {
    if (!is_device(device)) return INVALID_DEVICE;
    *active = devices_in_use >> device & 1;
    return SUCCESS;
}
EXPORT aclError aclrtGetDevice(int* device) {
    if (current_device < 0) return NO_CONTEXT;
    *device = current_device;
    return SUCCESS;
}
EXPORT aclError aclrtResetDevice(int) {
    current_device = -1;
    return SUCCESS;
}
EXPORT aclError aclrtGetCurrentContext(void** context) {
    if (current_device < 0) return NO_CONTEXT;
    *context = context_of(current_device);
    return SUCCESS;
}
EXPORT aclError aclrtSetCurrentContext(void* context) {
    return aclrtSetDevice(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 0x1000);
}
EXPORT aclError aclrtCreateContext(void** context, int device) {
    const auto error = aclrtSetDevice(device);
    if (error == SUCCESS) *context = context_of(device);
    return error;
}
EXPORT aclError aclrtDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return SUCCESS;
}
EXPORT aclError aclrtDeviceEnablePeerAccess(int, uint32_t) { return SUCCESS; }
EXPORT aclError aclrtDeviceGetBareTgid(int* process) {
    *process = getpid();
    return SUCCESS;
}

// Which figure: ACL_DEVICE_INFO_* of aclGetDeviceCapability.
EXPORT aclError aclGetDeviceCapability(uint32_t device, int which, int64_t* value) {
    if (!is_device(static_cast<int>(device))) return INVALID_DEVICE;
    const auto& configuration = sim_configuration();
    switch (which) {
        case 0: *value = configuration.cube_cores; return SUCCESS;
        case 1: *value = configuration.vector_cores; return SUCCESS;
        case 2: *value = configuration.l2; return SUCCESS;
        default: return INVALID_PARAM;
    }
}

// Which figure: ACL_DEV_ATTR_* of aclrtGetDeviceInfo.
EXPORT aclError aclrtGetDeviceInfo(uint32_t device, int which, int64_t* value) {
    if (!is_device(static_cast<int>(device))) return INVALID_DEVICE;
    const auto& configuration = sim_configuration();
    switch (which) {
        case 101: case 102: *value = configuration.cube_cores; return SUCCESS;
        case 201: *value = configuration.vector_cores; return SUCCESS;
        case 301: *value = static_cast<int64_t>(configuration.memory); return SUCCESS;
        case 302: *value = configuration.l2; return SUCCESS;
        default: return INVALID_PARAM;
    }
}
EXPORT aclError aclrtGetDeviceResLimit(int device, int which, uint32_t* value) {
    int64_t cores = 0;
    const auto error = aclGetDeviceCapability(static_cast<uint32_t>(device), which == 0 ? 0 : 1, &cores);
    *value = static_cast<uint32_t>(cores);
    return error;
}

// ---- memory ----
EXPORT aclError aclrtMalloc(void** pointer, size_t bytes, int) { return take(pointer, bytes); }
EXPORT aclError aclrtMallocAlign32(void** pointer, size_t bytes, int) { return take(pointer, bytes); }
EXPORT aclError aclrtFree(void* pointer) { return arena().give(pointer) ? SUCCESS : INVALID_PARAM; }
EXPORT aclError aclrtMallocHost(void** pointer, size_t bytes) {
    const size_t taken = bytes ? bytes : 64;
    if (posix_memalign(pointer, 64, taken)) return OUT_OF_MEMORY;
    pinned().add(*pointer, taken);
    return SUCCESS;
}
EXPORT aclError aclrtFreeHost(void* pointer) {
    pinned().remove(pointer);
    free(pointer);
    return SUCCESS;
}
EXPORT aclError aclrtMemset(void* target, size_t room, int value, size_t bytes) {
    if (bytes > room) return INVALID_PARAM;
    if (const aclError code = sim_unsafe_in_capture("aclrtMemset")) return code;
    memset(target, value, bytes);
    return SUCCESS;
}
EXPORT aclError aclrtMemsetAsync(void* target, size_t room, int value, size_t bytes, void* stream) {
    if (bytes > room) return INVALID_PARAM;
    const auto work = [=] {
        memset(target, value, bytes);
        return SUCCESS;
    };
    return sim_captured(stream) ? sim_capture(stream, work) : work();
}
EXPORT aclError aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, int) {
    if (!fits(bytes, room)) return INVALID_PARAM;
    if (const aclError code = sim_unsafe_in_capture("aclrtMemcpy")) return code;
    return copy(target, source, bytes, false);
}
EXPORT aclError aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, int, void* stream) {
    if (!fits(bytes, room)) return INVALID_PARAM;
    // Host memory that is not pinned makes of it a copy that waits.
    if (!reachable(target) || !reachable(source))
        if (const aclError code = sim_unsafe_in_capture("aclrtMemcpyAsync with host memory that is not pinned")) return code;
    const auto work = [=] { return copy(target, source, bytes, true); };
    return sim_captured(stream) ? sim_capture(stream, work) : work();
}
EXPORT aclError aclrtGetMemInfo(int, size_t* unused, size_t* total) {
    // torch_npu asks before it has set a device.
    *total = sim_configuration().memory;
    *unused = *total - arena().used(current_device < 0 ? 0 : current_device);
    return SUCCESS;
}

// ---- streams and events ----
EXPORT aclError aclrtCreateStream(void** stream) {
    static std::mutex mutex;
    static intptr_t next = 0x100000;
    std::lock_guard<std::mutex> lock(mutex);
    *stream = reinterpret_cast<void*>(next += 16);
    return SUCCESS;
}
EXPORT aclError aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
EXPORT aclError aclrtDestroyStream(void*) { return SUCCESS; }
EXPORT aclError aclrtDestroyStreamForce(void*) { return SUCCESS; }
EXPORT aclError aclrtStreamQuery(void* stream, int* status) {
    *status = 0;
    return sim_wait_in_capture(stream, "aclrtStreamQuery");
}
EXPORT aclError aclrtStreamWaitEvent(void* stream, void* event) { return sim_wait_event(stream, event); }
EXPORT aclError aclrtSetStreamFailureMode(void*, uint64_t) { return SUCCESS; }
EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return SUCCESS; }
EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return SUCCESS; }
EXPORT aclError aclrtProcessReport(int) { return SUCCESS; }

EXPORT aclError aclrtSynchronizeStream(void* stream) {
    if (const aclError code = sim_wait_in_capture(stream, "aclrtSynchronizeStream")) return code;
    sim_note(Event::synchronise_stream, 0, 0, false);
    return SUCCESS;
}
EXPORT aclError aclrtSynchronizeStreamWithTimeout(void* stream, int) { return aclrtSynchronizeStream(stream); }
EXPORT aclError aclrtSynchronizeDevice() {
    if (const aclError code = sim_wait_in_capture(nullptr, "aclrtSynchronizeDevice")) return code;
    sim_note(Event::synchronise_device, 0, 0, false);
    return SUCCESS;
}
EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int) { return aclrtSynchronizeDevice(); }
EXPORT aclError aclrtSynchronizeEvent(void* event) {
    if (const aclError code = sim_ask_event(event, "aclrtSynchronizeEvent")) return code;
    sim_note(Event::synchronise_event, 0, 0, false);
    return SUCCESS;
}

EXPORT aclError aclrtCreateEvent(void** event) {
    *event = new RecordedEvent;
    return SUCCESS;
}
EXPORT aclError aclrtCreateEventWithFlag(void** event, uint32_t) { return aclrtCreateEvent(event); }
EXPORT aclError aclrtCreateEventExWithFlag(void** event, uint32_t) { return aclrtCreateEvent(event); }
EXPORT aclError aclrtDestroyEvent(void* event) {
    delete static_cast<RecordedEvent*>(event);
    return SUCCESS;
}
EXPORT aclError aclrtRecordEvent(void* event, void* stream) {
    static_cast<RecordedEvent*>(event)->at = milliseconds();
    return sim_record_event(event, stream);
}
EXPORT aclError aclrtResetEvent(void*, void*) { return SUCCESS; }
EXPORT aclError aclrtQueryEventStatus(void* event, int* status) {
    *status = 1;
    return sim_ask_event(event, "aclrtQueryEventStatus");
}
EXPORT aclError aclrtQueryEventWaitStatus(void*, int* status) {
    *status = 0;
    return SUCCESS;
}
EXPORT aclError aclrtEventElapsedTime(float* elapsed, void* start, void* end) {
    *elapsed = static_cast<float>(static_cast<RecordedEvent*>(end)->at - static_cast<RecordedEvent*>(start)->at);
    return SUCCESS;
}
