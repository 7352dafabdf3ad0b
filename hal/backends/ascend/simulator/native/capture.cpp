// Graph capture (the aclmdlRI functions): what a captured stream is given is kept and runs when the graph is replayed.
// Streams join a capture by waiting for its events, and must have joined back before it ends, as on a device. Replay
// keeps the order in which the work was given.
#include "simulator.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

namespace {

// rt_error_codes.h
constexpr aclError DEPENDENCY = 107024;
constexpr aclError UNJOINED = 107025;
constexpr aclError STREAM_CAPTURED = 107027;
constexpr aclError EVENT_CAPTURED = 107028;
constexpr aclError STREAM_NOT_CAPTURED = 107029;
constexpr aclError MODE_NOT_SUPPORT = 107030;
constexpr aclError CONFLICT = 107032;
constexpr aclError UNMATCHED = 107036;
constexpr aclError WRONG_THREAD = 107038;
constexpr aclError INVALIDATED = 507903;

enum Mode { global, thread_local_, relaxed };
enum Status { none, active, invalidated };

// How much of each stream's work is known to be done where this clock stands.
typedef std::map<const void*, size_t> Clock;

struct Capture {
    const void* origin;
    Mode mode;
    std::thread::id thread;
    Status status = active;
    std::string reason;                    // why it was invalidated
    std::map<const void*, Clock> streams;  // those that take part; each one's own entry counts its work
    std::vector<std::function<aclError()>> work;
};
typedef std::shared_ptr<Capture> Shared;

struct Recorded {
    Shared capture;
    Clock clock;
};

std::mutex mutex;
std::atomic<int> underway{0};
thread_local Mode thread_mode = global;

struct State {
    std::unordered_map<const void*, Shared> streams;  // in capture
    std::unordered_map<const void*, Shared> graphs;   // by the pointer that stands for them
    std::unordered_map<const void*, Recorded> events; // recorded in a capture, last
};

// Never destroyed: graphs die while the process ends.
State& state() {
    static State& instance = *new State;
    return instance;
}

Shared find(const std::unordered_map<const void*, Shared>& among, const void* key) {
    const auto found = among.find(key);
    return found == among.end() ? nullptr : found->second;
}

aclError fail(aclError code, const std::string& what) {
    sim_set_error(("simulated CANN: " + what).c_str());
    return code;
}

aclError invalidate(Capture& capture, aclError code, const std::string& what) {
    if (capture.status == active) {
        capture.status = invalidated;
        capture.reason = what;
    }
    return fail(code, what + "; the capture is invalidated");
}

aclError broken(const Capture& capture) {
    return fail(INVALIDATED, "the graph capture was invalidated before: " + capture.reason);
}

// The capture that forbids the calling thread what is unsafe in captures, if any.
Shared forbidding() {
    if (thread_mode == relaxed) return nullptr;
    for (const auto& [stream, capture] : state().streams)
        if (capture->status == active && capture->mode != relaxed &&
            (capture->mode == global || capture->thread == std::this_thread::get_id()))
            return capture;
    return nullptr;
}

}  // namespace

bool sim_captured(const void* stream) {
    if (!underway) return false;
    std::lock_guard<std::mutex> lock(mutex);
    return state().streams.count(stream);
}

aclError sim_capture(const void* stream, std::function<aclError()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    const Shared capture = find(state().streams, stream);
    if (!capture) return fail(STREAM_NOT_CAPTURED, "the graph capture of this stream has ended");
    if (capture->status != active) return broken(*capture);
    capture->work.push_back(std::move(work));
    ++capture->streams[stream][stream];
    return SUCCESS;
}

aclError sim_wait_in_capture(const void* stream, const char* call) {
    if (!underway) return SUCCESS;
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [captured, capture] : state().streams)
        if (!stream || captured == stream)
            return invalidate(*capture, STREAM_CAPTURED,
                              std::string(call) + " waits for a stream whose work a graph capture only records");
    return SUCCESS;
}

aclError sim_unsafe_in_capture(const char* call) {
    if (!underway) return SUCCESS;
    std::lock_guard<std::mutex> lock(mutex);
    const Shared capture = forbidding();
    if (!capture) return SUCCESS;
    return invalidate(*capture, MODE_NOT_SUPPORT, std::string(call) + " runs at once, which a graph capture forbids");
}

aclError sim_ask_event(const void* event, const char* call) {
    if (!underway) return SUCCESS;
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = state().events.find(event);
    if (found == state().events.end()) return SUCCESS;
    return invalidate(*found->second.capture, EVENT_CAPTURED,
                      std::string(call) + " asks for an event that a graph capture only records");
}

aclError sim_record_event(const void* event, const void* stream) {
    if (!underway) return SUCCESS;
    std::lock_guard<std::mutex> lock(mutex);
    const Shared capture = find(state().streams, stream);
    if (!capture) {
        state().events.erase(event);
        return SUCCESS;
    }
    if (capture->status != active) return broken(*capture);
    state().events[event] = {capture, capture->streams[stream]};
    return SUCCESS;
}

aclError sim_wait_event(const void* stream, const void* event) {
    if (!underway) return SUCCESS;
    std::lock_guard<std::mutex> lock(mutex);
    const Shared waiting = find(state().streams, stream);
    const auto found = state().events.find(event);
    if (found == state().events.end()) {
        if (!waiting) return SUCCESS;
        return invalidate(*waiting, DEPENDENCY,
                          "aclrtStreamWaitEvent waits in a graph capture for an event that was recorded outside it");
    }
    const auto& [capture, clock] = found->second;
    if (capture->status != active) return broken(*capture);
    if (waiting && waiting != capture)
        return invalidate(*waiting, CONFLICT, "aclrtStreamWaitEvent ties two graph captures to each other");
    state().streams[stream] = capture;
    auto& known = capture->streams[stream];
    for (const auto& [other, done] : clock) known[other] = std::max(known[other], done);
    return SUCCESS;
}

EXPORT aclError aclmdlRICaptureBegin(void* stream, int mode) {
    std::lock_guard<std::mutex> lock(mutex);
    if (mode < global || mode > relaxed) return INVALID_PARAM;
    if (!stream) return fail(NOT_SUPPORTED, "the default stream of a context cannot be captured");
    if (find(state().streams, stream)) return fail(STREAM_CAPTURED, "this stream is in a graph capture already");
    const auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = static_cast<Mode>(mode);
    capture->thread = std::this_thread::get_id();
    capture->streams[stream];
    state().streams[stream] = capture;
    ++underway;
    return SUCCESS;
}

EXPORT aclError aclmdlRICaptureGetInfo(void* stream, int* status, void** graph) {
    *status = none;
    *graph = nullptr;
    if (!underway) return SUCCESS;
    std::lock_guard<std::mutex> lock(mutex);
    if (const Shared capture = find(state().streams, stream)) {
        *status = capture->status;
        *graph = capture.get();
    }
    return SUCCESS;
}

EXPORT aclError aclmdlRICaptureEnd(void* stream, void** graph) {
    *graph = nullptr;
    Shared capture;  // may be the last to hold it: what it kept goes without the lock
    std::lock_guard<std::mutex> lock(mutex);
    capture = find(state().streams, stream);
    if (!capture) return fail(STREAM_NOT_CAPTURED, "aclmdlRICaptureEnd: this stream is in no graph capture");
    if (capture->origin != stream)
        return fail(UNMATCHED, "aclmdlRICaptureEnd: the graph capture began on another stream");
    if (capture->mode != relaxed && capture->thread != std::this_thread::get_id())
        return fail(WRONG_THREAD, "aclmdlRICaptureEnd: the graph capture began in another thread");
    const Clock& known = capture->streams[stream];
    bool joined = true;
    for (const auto& [other, clock] : capture->streams) {
        state().streams.erase(other);
        const auto wanted = clock.find(other), seen = known.find(other);
        if (wanted != clock.end() && (seen == known.end() || seen->second < wanted->second)) joined = false;
    }
    for (auto event = state().events.begin(); event != state().events.end();)
        event = event->second.capture == capture ? state().events.erase(event) : std::next(event);
    --underway;
    if (capture->status != active) return broken(*capture);
    if (!joined) return fail(UNJOINED, "aclmdlRICaptureEnd: a stream that took part did not join back");
    *graph = capture.get();
    state().graphs[capture.get()] = capture;
    return SUCCESS;
}

EXPORT aclError aclmdlRICaptureThreadExchangeMode(int* mode) {
    if (*mode < global || *mode > relaxed) return INVALID_PARAM;
    const Mode before = thread_mode;
    thread_mode = static_cast<Mode>(*mode);
    *mode = before;
    return SUCCESS;
}

EXPORT aclError aclmdlRIExecuteAsync(void* graph, void* stream) {
    if (sim_captured(stream)) return fail(NOT_SUPPORTED, "a graph within a graph is not simulated");
    Shared captured;
    {
        std::lock_guard<std::mutex> lock(mutex);
        captured = find(state().graphs, graph);
    }
    if (!captured) return fail(INVALID_PARAM, "aclmdlRIExecuteAsync: no such graph");
    for (const auto& step : captured->work)
        if (const aclError code = step()) return code;
    return SUCCESS;
}

EXPORT aclError aclmdlRIDestroy(void* graph) {
    Shared last;  // what it kept goes without the lock
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = state().graphs.find(graph);
    if (found == state().graphs.end()) return INVALID_PARAM;
    last = std::move(found->second);
    state().graphs.erase(found);
    return SUCCESS;
}

EXPORT aclError aclrtSetStreamAttribute(void*, int, void*) { return SUCCESS; }
