// From an aclnn call to the Python side: starts it, reads the arguments that a signature names, reports errors.
#include "simulator.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>

namespace {

Configuration configuration;

// What the Python side gives us to call.
typedef int64_t (*Prepare)(int operation, const int64_t* words, int64_t count);  // executor, or negative
typedef int (*Execute)(int64_t executor);                                        // 0 or an error code
typedef void (*Keep)(int64_t executor, int on);  // for graphs: it runs any number of times, until it is off
typedef void (*Note)(int event, int64_t detail, int64_t bytes, int asynchronous);
typedef void (*Initialised)();
std::atomic<Prepare> prepare{nullptr};
std::atomic<Execute> execute{nullptr};
std::atomic<Keep> keep{nullptr};
std::atomic<Note> note{nullptr};
std::atomic<Initialised> initialised{nullptr};
std::vector<std::string> signatures;  // by operator; empty = not simulated

thread_local std::string error;
thread_local bool has_error = false;

enum State { idle, starting, running, failed };
std::atomic<int> state{idle};
pthread_t starter;

// Python's own functions, found in the process: no headers and no library of a certain Python needed.
template <class F>
F python(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name)); }

int start_python_side() {
    const auto run = python<int (*)(const char*, void*)>("PyRun_SimpleStringFlags");
    return run("__import__('hal.backends.ascend.simulator.runtime', fromlist=['attach']).attach()", nullptr);
}

bool is_stack(const void* near, uint64_t word) {
    const auto here = reinterpret_cast<uint64_t>(near);
    return word > here && word < here + (1 << 20);
}

char letter_of(const Object* object) {
    switch (object->kind) {
        case Kind::tensor: return 't';
        case Kind::scalar: return 'k';
        case Kind::tensors: return 'l';
        case Kind::scalars: return 'K';
        default: return 'a';
    }
}

const char* name_of(char letter) {
    switch (letter) {
        case 't': return "an aclTensor";
        case 'k': return "an aclScalar";
        case 'l': return "an aclTensorList";
        case 'K': return "an aclScalarList";
        case 'a': return "an array";
        default: return "no object";
    }
}

// How both supported ABIs pass arguments: registers of each class first, what is left on the stack, eight bytes each.
#if defined(__x86_64__)
constexpr int INTEGERS = 6;
#elif defined(__aarch64__)
constexpr int INTEGERS = 8;
#else
#error "the simulated CANN knows the calling conventions of x86_64 and aarch64 alone"
#endif
constexpr int FLOATS = 8;

struct Arguments {
    const uint64_t* integers;
    const uint64_t* floats;
    const uint64_t* stack;
    int next_integer = 0, next_float = 0, next_stack = 0;

    uint64_t integer() { return next_integer < INTEGERS ? integers[next_integer++] : stack[next_stack++]; }
    uint64_t floating() { return next_float < FLOATS ? floats[next_float++] : stack[next_stack++]; }
};

// Arguments as 64-bit words. An object is its record's length in words (0: a null pointer), then what it holds.
class Writer {
public:
    std::vector<int64_t> words;
    uint32_t devices = 0;  // a bit for each in whose memory a tensor with elements lies

    void clear() {
        words.clear();
        devices = 0;
    }

    void put(int64_t word) { words.push_back(word); }

    void tensor(const Tensor& t) {
        const size_t start = open();
        const int device = sim_device_of(t.data);
        const bool empty = std::find(t.shape.begin(), t.shape.end(), 0) != t.shape.end();
        if (device >= 0 && !empty) devices |= 1u << device;
        put(reinterpret_cast<int64_t>(static_cast<const Object*>(&t)));
        put(reinterpret_cast<int64_t>(t.data));
        put(t.dtype);
        put(t.format);
        put(t.offset);
        put(static_cast<int64_t>(t.shape.size()));
        words.insert(words.end(), t.shape.begin(), t.shape.end());
        words.insert(words.end(), t.strides.begin(), t.strides.end());
        words.insert(words.end(), t.storage.begin(), t.storage.end());
        close(start);
    }

    void scalar(const Scalar& s) {
        const size_t start = open();
        put(s.dtype);
        int64_t value[2];
        memcpy(value, s.value, sizeof value);
        put(value[0]);
        put(value[1]);
        close(start);
    }

    void array(const Array& a) {
        const size_t start = open();
        put(static_cast<int64_t>(a.kind));
        words.insert(words.end(), a.words.begin(), a.words.end());
        close(start);
    }

    // False: an item is no live object of the kind.
    bool list(const List& l) {
        const size_t start = open();
        put(static_cast<int64_t>(l.items.size()));
        for (const void* item : l.items) {
            if (!item) {
                put(0);
                continue;
            }
            const Object* object = sim_object(item);
            if (!object || object->kind != (l.kind == Kind::tensors ? Kind::tensor : Kind::scalar)) return false;
            if (l.kind == Kind::tensors) tensor(static_cast<const Tensor&>(*object));
            else scalar(static_cast<const Scalar&>(*object));
        }
        close(start);
        return true;
    }

    void text(const char* text) {
        const size_t start = open();
        const size_t length = strlen(text);
        put(static_cast<int64_t>(length));
        const size_t at = words.size();
        words.resize(at + (length + 7) / 8);
        memcpy(words.data() + at, text, length);
        close(start);
    }

    bool object(const Object& object) {
        switch (object.kind) {
            case Kind::tensor: tensor(static_cast<const Tensor&>(object)); return true;
            case Kind::scalar: scalar(static_cast<const Scalar&>(object)); return true;
            case Kind::tensors: case Kind::scalars: return list(static_cast<const List&>(object));
            default: array(static_cast<const Array&>(object)); return true;
        }
    }

private:
    size_t open() {
        put(0);
        return words.size() - 1;
    }
    void close(size_t start) { words[start] = static_cast<int64_t>(words.size() - start); }
};

int64_t misfit(const char* name, int position, char is, char says) {
    char message[256];
    snprintf(message, sizeof message, "simulated CANN: %s: argument %d is %s, the signature says '%c'", name, position,
             name_of(is), says);
    sim_set_error(message);
    return ACLNN_INNER_ERROR;
}

// Reads what the signature names; SUCCESS or the error code.
int64_t read(const char* name, const std::string& signature, Arguments& arguments, Writer& out) {
    int position = 0;
    for (const char letter : signature) {
        ++position;
        switch (letter) {
            case 'd': out.put(static_cast<int64_t>(arguments.floating())); break;
            case 'f': {
                const uint32_t bits = static_cast<uint32_t>(arguments.floating());
                float narrow;
                memcpy(&narrow, &bits, sizeof narrow);
                const double wide = narrow;
                int64_t word;
                memcpy(&word, &wide, sizeof word);
                out.put(word);
                break;
            }
            case 'i': out.put(static_cast<int64_t>(arguments.integer())); break;
            case 'j': case 'T': out.put(static_cast<int32_t>(arguments.integer())); break;
            case 'h': out.put(static_cast<int16_t>(arguments.integer())); break;
            case 'y': out.put(static_cast<int8_t>(arguments.integer())); break;
            case 'b': out.put(static_cast<uint8_t>(arguments.integer()) != 0); break;
            case 's': {
                const auto text = reinterpret_cast<const char*>(arguments.integer());
                if (sim_object(text)) return misfit(name, position, letter_of(sim_object(text)), letter);
                if (text) out.text(text);
                else out.put(0);
                break;
            }
            default: {
                const auto pointer = reinterpret_cast<const void*>(arguments.integer());
                if (!pointer) {
                    out.put(0);
                    break;
                }
                const Object* object = sim_object(pointer);
                if (!object || letter_of(object) != letter)
                    return misfit(name, position, object ? letter_of(object) : '?', letter);
                if (!out.object(*object)) return misfit(name, position, '?', letter);
            }
        }
    }
    return SUCCESS;
}

// What the integer-class arguments seem to be, up to the two pointers into the caller's frame that end them.
std::string guess(const Arguments& from) {
    Arguments arguments = from;
    std::string found;
    uint64_t before = 0;
    for (int i = 0; i < 48; ++i) {
        const uint64_t word = arguments.integer();
        if (is_stack(from.stack, before) && is_stack(from.stack, word)) {
            found.resize(found.size() - 2);
            break;
        }
        before = word;
        const Object* object = sim_object(reinterpret_cast<const void*>(word));
        found += object ? letter_of(object) : word == 0 ? '0' : word == UINT64_MAX || word < 1 << 24 ? 'i' : '?';
        found += ' ';
    }
    return found;
}

// An executor that a graph holds.
struct Kept {
    const int64_t executor;
    explicit Kept(int64_t executor) : executor(executor) { tell(1); }
    ~Kept() { tell(0); }
    void tell(int on) const {
        if (const Keep call = keep) call(executor, on);
    }
};

int64_t run(int64_t executor, const void* stream) {
    if (!sim_captured(stream)) return execute.load()(executor);
    const auto kept = std::make_shared<Kept>(executor);
    return sim_capture(stream, [kept] { return execute.load()(kept->executor); });
}

// A kernel reaches the memory of one device; of some operators torch_npu leaves it to that to refuse.
int64_t apart(const char* name, uint32_t devices) {
    std::string message = std::string("simulated CANN: ") + name + ": a call's tensors lie on one device, but found";
    for (int device = 0; devices >> device; ++device)
        if (devices >> device & 1) message += " npu:" + std::to_string(device);
    sim_set_error(message.c_str());
    return ACLNN_PARAM_INVALID;
}

int64_t not_simulated(const char* name, const Arguments& arguments) {
    const std::string message = std::string("simulated CANN: ") + name +
                                " is not simulated (its integer-class arguments look like: " + guess(arguments) + ")";
    sim_set_error(message.c_str());
    return ACLNN_INNER_ERROR;
}

}  // namespace

namespace {

// True: the Python side runs.
bool started() {
    if (state == running || state == failed) return state == running;
    const auto is_initialised = python<int (*)()>("Py_IsInitialized");
    if (!is_initialised || !is_initialised()) {
        fprintf(stderr, "simulated CANN: it computes in Python, but this process runs no Python\n");
        state = failed;
        return false;
    }
    const auto ensure = python<int (*)()>("PyGILState_Ensure");
    const auto release = python<void (*)(int)>("PyGILState_Release");
    // Whoever gets Python's lock first starts the Python side; another thread waits without the lock.
    for (;;) {
        const int held = ensure();
        int expected = idle;
        if (state.compare_exchange_strong(expected, starting)) {
            starter = pthread_self();
            state = start_python_side() == 0 ? running : failed;
            release(held);
            return state == running;
        }
        release(held);
        if (expected != starting) return expected == running;
        if (pthread_equal(starter, pthread_self())) return false;
        usleep(1000);
    }
}

}  // namespace

bool sim_ready() {
    if (started()) return true;
    sim_set_error("simulated CANN: its Python side did not start; standard error says why");
    return false;
}

const Configuration& sim_configuration() { return configuration; }

void sim_note(Event event, int64_t detail, int64_t bytes, bool asynchronous) {
    if (const Note call = note) call(static_cast<int>(event), detail, bytes, asynchronous);
}

EXPORT void sim_configure(const char* soc, const char* cann, int devices, uint64_t memory, int64_t cube_cores,
                          int64_t vector_cores, int64_t l2) {
    configuration = {soc, cann, devices, memory, cube_cores, vector_cores, l2};
}
EXPORT void sim_callbacks(Prepare prepare_call, Execute execute_call, Initialised initialised_call) {
    signatures.resize(sim_operator_total);
    initialised = initialised_call;
    execute = execute_call;
    prepare = prepare_call;
}
EXPORT void sim_keep_with(Keep call) { keep = call; }
EXPORT void sim_observe(Note call) { note = call; }
EXPORT void sim_initialised() {
    if (const Initialised call = initialised) call();
}

EXPORT int sim_operator_count() { return sim_operator_total; }
EXPORT const char* sim_operator_name(int operation) { return sim_operator_names[operation]; }
EXPORT void sim_define(int operation, const char* signature) { signatures[operation] = signature; }

EXPORT void sim_set_error(const char* message) {
    error = message;
    has_error = true;
}
EXPORT const char* aclGetRecentErrMsg() {
    if (!has_error) return nullptr;
    has_error = false;
    return error.c_str();
}

// Every entry point of libopapi.so arrives here (slots.S): two an operator, first the one that asks for workspace.
EXPORT int64_t sim_enter(int slot, const uint64_t* integers, const uint64_t* floats, const uint64_t* stack) {
    Arguments arguments{integers, floats, stack};
    const int operation = slot / 2;
    const char* name = sim_operator_names[operation];
    if (!sim_ready()) return ACLNN_INNER_ERROR;
    if (slot % 2) return run(static_cast<int64_t>(integers[2]), reinterpret_cast<const void*>(integers[3]));
    const std::string& signature = signatures[operation];
    if (signature.empty()) return not_simulated(name, arguments);
    static thread_local Writer writer;
    writer.clear();
    if (const int64_t code = read(name, signature, arguments, writer)) return code;
    if (writer.devices & (writer.devices - 1)) return apart(name, writer.devices);
    const auto workspace = reinterpret_cast<uint64_t*>(arguments.integer());
    const auto executor = reinterpret_cast<int64_t*>(arguments.integer());
    if (!workspace || !executor || sim_object(workspace) || sim_object(executor)) {
        const std::string message = std::string("simulated CANN: ") + name + ": its signature '" + signature +
                                    "' does not fit; its integer-class arguments look like: " +
                                    guess(Arguments{integers, floats, stack});
        sim_set_error(message.c_str());
        return ACLNN_INNER_ERROR;
    }
    const int64_t prepared = prepare.load()(operation, writer.words.data(), static_cast<int64_t>(writer.words.size()));
    if (prepared < 0) return ACLNN_PARAM_INVALID;
    *workspace = 0;
    *executor = prepared;
    return SUCCESS;
}
