# shellcheck shell=bash
# Bash completion of elastic and elastic-*: commands, options and names of runs. The program of this
# installation is asked (click), which takes a third of a second; never one beside what is typed.
_elastic_program="$(readlink -f "${BASH_SOURCE[0]}")"
_elastic_program="${_elastic_program%/etc/*}/bin/elastic"

_elastic() {
    local words=("${COMP_WORDS[@]}") at="${COMP_CWORD}" kind answer
    local program="${words[0]##*/}"
    if [[ "${program}" == elastic-* ]]; then
        words=(elastic "${program#elastic-}" "${words[@]:1}")
        at=$((at + 1))
    fi
    COMPREPLY=()
    while IFS=, read -r kind answer; do
        case "${kind}" in
            plain) COMPREPLY+=("${answer}") ;;
            file | dir) compopt -o default ;;
        esac
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD="${at}" _ELASTIC_COMPLETE=bash_complete "${_elastic_program}" 2>/dev/null)
}
complete -F _elastic elastic elastic-{audit,chaos,config,demo,doctor,evaluate,logs,metrics,plan,reconcile,report,sandbox,scale,status,stop,submit,validate}
